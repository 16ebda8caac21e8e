"""A service that is away costs nobody anything for as long as the patience lasts."""

import asyncio
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from staleflow.reward.judge import IN_A_ROW, Judge, Judgement
from staleflow.reward.options import Reward
from staleflow.reward.pool import RewardPool
from staleflow.tasks.task import Problem


class Service(BaseHTTPRequestHandler):
    away = 0
    """How often it answers that it is."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = type(self)
        if kind.away:
            kind.away -= 1
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"reward": 0.5}')

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


async def asked(options: Reward, names: list[str], on_away: Callable[[str], None]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    done = asyncio.Event()

    def hear(name: str, answer: float | str, _parts: tuple[float, ...] = ()) -> None:
        found[name] = answer
        if len(found) == len(names):
            done.set()

    pool = RewardPool(options, hear, hear, on_away=on_away)
    await pool.start()
    try:
        for name in names:
            pool.submit(name, Problem("1 + 1", {}))
        await done.wait()
    finally:
        await pool.close()
    return found


@pytest.fixture
def server() -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    yield server
    server.server_close()


def test_a_service_that_is_away_for_a_moment_costs_nothing(server: ThreadingHTTPServer) -> None:
    """256 refused connections, a second's worth, ended the run."""
    Service.away = 3
    told: list[str] = []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    names = [f"p{at}" for at in range(6)]
    found = asyncio.run(asked(Reward(f"http://127.0.0.1:{server.server_port}"), names, told.append))
    server.shutdown()
    assert found == dict.fromkeys(names, 0.5)
    assert told
    assert all("503" in why for why in told)


def test_a_service_that_stays_away_fails_when_the_patience_is_over(server: ThreadingHTTPServer) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    server.server_close()
    told: list[str] = []
    found = asyncio.run(asked(Reward(address, patience_s=0.5), ["p0", "p1"], told.append))
    assert told
    assert all("Connection refused" in str(why) for why in found.values())


def test_a_reward_that_hangs_in_an_evaluation_is_named_and_does_not_stop_it() -> None:
    """The evaluator called it in its own process, without a limit; five minutes later the run ended."""
    judge = Judge(Reward("tests.reward.functions:sleeps_for_odd", timeout_s=0.5), decoder="")
    moves: list[None] = []
    answers = [(Problem("", {"at": at}), (1, 2)) for at in range(4)]
    judged = judge(answers, lambda: moves.append(None))
    assert judged[0::2] == [Judgement(1.0), Judgement(1.0)]
    assert all("took more than 0.5 s" in str(why) for why in judged[1::2])
    assert moves


def test_a_service_that_is_away_in_an_evaluation_is_said(server: ThreadingHTTPServer) -> None:
    """The first evaluation of a run waited for five minutes without a word."""
    address, told = f"http://127.0.0.1:{server.server_port}", list[str]()
    server.server_close()
    judge = Judge(Reward(address, patience_s=0.5), decoder="", on_away=told.append)
    (why,) = judge([(Problem("", {}), (1, 2))], lambda: None)
    assert "Connection refused" in str(why)
    assert "Connection refused" in told[0]


def test_where_nothing_can_be_scored_the_rest_is_not_waited_for() -> None:
    judge = Judge(Reward("tests.reward.functions:raises_always"), decoder="")
    judged = judge([(Problem("", {}), ())] * (20 * IN_A_ROW), lambda: None)
    assert all(isinstance(each, str) for each in judged)
    assert judge([(Problem("", {}), ())], lambda: None) != [0.0], "and the next evaluation asks again"
