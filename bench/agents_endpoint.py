"""What the endpoint costs: milliseconds that it adds to a call, with many episodes at once.

    python bench/agents_endpoint.py [--episodes 64] [--turns 8] [--model-ms 250] [--rounds 3] [--json]

Agents in another process hold conversations over HTTP, each call with its whole history, a tool and a result of some
200 tokens. The model is a timer that answers 64 tokens after ``--model-ms``; everything else is the real endpoint. Each
round has the same agents, with the same calls, also talk to a *stub*: a server that reads a request and answers fixed
bytes after the same time.

``added`` is the median time of a call beyond the model's, and ``stub`` the same with the stub: what the agents
themselves, the sockets and a busy machine take. ``endpoint`` is the difference, which is what the endpoint adds, and
has to be at most two. ``alone`` has one agent at a time, so that no call waits for another. ``cpu`` is the endpoint's
CPU time per call, and ``core`` how long its process was ready and waited for a core, per call: where that is more than
``cpu``, something else had the cores, calls pile up behind it, and only ``cpu`` says something. ``no model`` is as fast
as agents can ask, which shows how many calls one endpoint can serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from staleflow.agents.endpoint import Endpoint
from staleflow.agents.render import Renderer
from staleflow.agents.turns import Turn
from staleflow.rollout.options import Sampling

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import amounts
from tests.agents.serving import TOOLS, USER, Wire
from tests.agents.templates import CALLS, stops_of, words_of

TARGET_MS = 2.0
"""Added to a call at most."""
RESULT = "the cat said hello to the dog, and 46 of them. " * 10
MADE = 64
"""Tokens of an answer."""


class Timer:
    """Episodes whose turns take a fixed time."""

    def __init__(self, renderer: Renderer, seconds: float) -> None:
        words: Any = renderer.words
        text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        made = words.encode(text, add_special_tokens=False)
        self.made = [*words.encode("a" * MADE, add_special_tokens=False)[: max(0, MADE - 1 - len(made))], *made]
        self.made.append(words.eos_token_id)
        self.prompt = renderer.first(USER, TOOLS)
        self.seconds = seconds

    def held(self, branch: str) -> list[int]:  # noqa: ARG002
        return self.prompt

    def branch(self, parent: str, shared: int) -> str:
        raise AssertionError(f"{parent} was branched at {shared}")

    async def turn(self, branch: str, at: int, given: Sequence[int], limit: int) -> Turn:  # noqa: ARG002
        await asyncio.sleep(self.seconds)
        return Turn(self.made, [-0.5] * len(self.made), ((0, len(self.made)),), "stop")


def agents(port: int, secrets: Sequence[str], turns: int, model_s: float, answer: Any) -> None:
    """In another process: every agent plays its turns; the seconds of each call are sent back."""

    async def one(at: int, secret: str) -> list[float]:
        await asyncio.sleep(model_s * at / len(secrets))  # not all at the same moment
        wire, messages, seconds = Wire(port, secret), list[Any](USER), list[float]()
        for _ in range(turns):
            began = time.perf_counter()
            status, body = await wire.ask({"messages": messages, "tools": TOOLS})
            seconds.append(time.perf_counter() - began)
            assert status == 200, body
            message = body["choices"][0]["message"]
            call = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "content": RESULT, "tool_call_id": call}]
        wire.close()
        return seconds

    async def every() -> list[list[float]]:
        return await asyncio.gather(*(one(at, secret) for at, secret in enumerate(secrets)))

    answer.send([each for several in asyncio.run(every()) for each in several])


class Stub(asyncio.Protocol):
    """Reads a request, and answers the same bytes after the time that a model would take."""

    def __init__(self, seconds: float, answer: bytes) -> None:
        head = f"HTTP/1.1 200 \r\ncontent-type: application/json\r\ncontent-length: {len(answer)}\r\n\r\n"
        self.seconds, self.answer, self.heard = seconds, head.encode() + answer, b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        head, found, body = self.heard.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            assert self.transport is not None
            self.heard = b""
            asyncio.get_running_loop().call_later(self.seconds, self.transport.write, self.answer)


async def measure(episodes: int, turns: int, model_s: float) -> dict[str, Any]:
    """With the endpoint, then with the stub: seconds of each call, and what the endpoint's process did."""
    words = words_of(CALLS)
    renderer = Renderer(words, stops_of(words))
    renderer.prove()
    timer = Timer(renderer, model_s)
    endpoint = await Endpoint(timer, renderer, Sampling()).start()
    secrets = [endpoint.open(f"p{at}/0") for at in range(episodes)]
    port = int(endpoint.root.rpartition(":")[2])
    real = await timed(port, secrets, turns, model_s, lambda: any(endpoint.calls(f"p{at}/0") for at in range(episodes)))
    await endpoint.close()
    message = renderer.parse(timer.made, mark="stub")
    answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}).encode()
    connected: list[Stub] = []

    def connect() -> Stub:
        connected.append(Stub(model_s, answer))
        return connected[-1]

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0, backlog=1024)
    fixed = await timed(server.sockets[0].getsockname()[1], secrets, turns, model_s, lambda: bool(connected))
    server.close()
    return real | {"stub": fixed["seconds"]}


async def timed(port: int, secrets: list[str], turns: int, model_s: float, begun: Callable[[], bool]) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=agents, args=(port, secrets, turns, model_s, there))
    process.start()
    loop = asyncio.get_running_loop()
    while not begun() and process.is_alive():
        await asyncio.sleep(0.001)
    began, cpu, waited = loop.time(), time.process_time(), waited_for_a_core()
    seconds: list[float] = await loop.run_in_executor(None, here.recv)
    found = {
        "seconds": seconds,
        "wall": loop.time() - began,
        "cpu": time.process_time() - cpu,
        "core": waited_for_a_core() - waited,
    }
    process.join(timeout=30)
    return found


def waited_for_a_core() -> float:
    """Seconds that this thread was ready and did not run, by the kernel's count; 0 where it does not say."""
    path = Path("/proc/thread-self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def figures(rounds: Sequence[dict[str, Any]], model_s: float) -> dict[str, float]:
    added = sorted(1000 * (each - model_s) for found in rounds for each in found["seconds"])
    stub = sorted(1000 * (each - model_s) for found in rounds for each in found["stub"])
    return {
        "calls": len(added),
        "added": statistics.median(added),
        "stub": statistics.median(stub),
        "endpoint": statistics.median(added) - statistics.median(stub),
        "added p99": added[int(0.99 * (len(added) - 1))],
        "stub p99": stub[int(0.99 * (len(stub) - 1))],
        "cpu": 1000 * sum(found["cpu"] for found in rounds) / len(added),
        "core": 1000 * sum(found["core"] for found in rounds) / len(added),
        "calls/s": len(added) / sum(found["wall"] for found in rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=amounts.count, default=64)
    parser.add_argument("--turns", type=amounts.count, default=8)
    parser.add_argument("--model-ms", type=amounts.amount, default=250.0)
    parser.add_argument("--rounds", type=amounts.count, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    model_s = asked.model_ms / 1000
    shapes = {"at once": (asked.episodes, model_s), "alone": (1, 0.01), "no model": (asked.episodes, 0.0)}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in shapes}
    for _ in range(asked.rounds):
        for name, (episodes, seconds) in shapes.items():
            rounds[name].append(asyncio.run(measure(episodes, asked.turns, seconds)))
    found = {name: figures(rounds[name], shapes[name][1]) for name in shapes}
    if asked.json:
        print(json.dumps(found | {"episodes": asked.episodes, "target_ms": TARGET_MS}))
    else:
        names = list(found["at once"])
        print(f"{'ms per call':12}" + "".join(f"{name:>11}" for name in names))
        for name, row in found.items():
            print(f"{name:12}" + "".join(f"{row[each]:>11,.2f}" for each in names))
    busy = found["at once"]["core"] > found["at once"]["cpu"]
    if busy:
        print("others had the cores: of these figures only cpu is the endpoint's own", file=sys.stderr)
    return int(found["at once"]["cpu" if busy else "endpoint"] > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
