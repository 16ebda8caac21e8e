import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from staleflow.reward.function import Response, RewardError, checked, load_reward
from staleflow.reward.options import Reward
from staleflow.tasks.task import Problem

release = threading.Event()


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/hang":
            release.wait(20)
            return
        if self.path.startswith("/moved"):
            self.send_response(int(self.path[-3:]))
            self.send_header("Location", "/score")
            self.end_headers()
            return
        if self.path == "/broken":
            self.send_error(503)
            return
        reward: Any = len(asked["text"]) + sum(asked["tokens"]) + asked["facts"]["bonus"]
        body = {"/score": {"reward": reward}, "/string": {"reward": "high"}}.get(self.path, {"score": 1})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"reward": 1}')

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def address() -> Iterator[str]:
    release.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    release.set()
    server.shutdown()
    server.server_close()


def ask(address: str, timeout_s: float = 10.0) -> float:
    async def main() -> Any:
        answer: Any = load_reward(Reward(address, timeout_s=timeout_s))(
            Problem((1, 2), {"bonus": 100}), Response("abc", (5, 6))
        )
        return await answer

    try:
        return checked(asyncio.run(main()))
    finally:
        release.set()


def test_a_service_sees_everything_and_its_number_is_the_reward(address: str) -> None:
    assert ask(f"{address}/score") == 114.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("broken", "answered 503"),
        ("other", 'it must answer {"reward": number}'),
        ("string", "'high', a str: return a number"),
    ],
)
def test_a_service_that_fails_is_a_failure(address: str, path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        ask(f"{address}/{path}")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_without_the_body(address: str, code: int) -> None:
    with pytest.raises(RewardError, match=r"has moved to /score: give that as reward\.function"):
        ask(f"{address}/moved-{code}")


def test_a_service_that_hangs_is_given_up(address: str) -> None:
    with pytest.raises(RewardError, match="did not answer"):
        ask(f"{address}/hang", timeout_s=0.1)


def test_a_service_that_is_not_there_is_a_failure() -> None:
    with pytest.raises(RewardError, match="did not answer"):
        ask("http://127.0.0.1:9/score")
