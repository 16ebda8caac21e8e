"""What the endpoint costs: milliseconds that it adds to a call, with many episodes at once.

    python bench/agents_endpoint.py [--episodes 64] [--turns 8] [--model-ms 250] [--json]

Agents in another process hold conversations over HTTP, each call with its whole history, a tool and a result of some
200 tokens. The model is a timer that answers 64 tokens after ``--model-ms``; everything else is the real endpoint.
``added`` is the time of a call beyond that; ``cpu`` is the endpoint's CPU time per call. Then the same without a model,
as fast as agents can ask, which shows how many calls one endpoint can serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from staleflow.agents.endpoint import Endpoint
from staleflow.agents.render import Renderer
from staleflow.agents.turns import Turn
from staleflow.rollout.options import Sampling
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


async def measure(episodes: int, turns: int, model_s: float) -> dict[str, float]:
    words = words_of(CALLS)
    renderer = Renderer(words, stops_of(words))
    renderer.prove()
    endpoint = await Endpoint(Timer(renderer, model_s), renderer, Sampling()).start()
    secrets = [endpoint.open(f"p{at}/0") for at in range(episodes)]
    here, there = multiprocessing.get_context("spawn").Pipe()
    port = int(endpoint.root.rpartition(":")[2])
    process = multiprocessing.get_context("spawn").Process(target=agents, args=(port, secrets, turns, model_s, there))
    process.start()
    loop = asyncio.get_running_loop()
    while not any(endpoint.calls(f"p{at}/0") for at in range(episodes)) and process.is_alive():
        await asyncio.sleep(0.001)
    began, cpu = loop.time(), time.process_time()
    seconds: list[float] = await loop.run_in_executor(None, here.recv)
    wall, cpu = loop.time() - began, time.process_time() - cpu
    process.join(timeout=30)
    await endpoint.close()
    added = sorted((each - model_s) * 1000 for each in seconds)
    return {
        "calls": len(added),
        "added median": statistics.median(added),
        "added p99": added[int(0.99 * (len(added) - 1))],
        "cpu": 1000 * cpu / len(added),
        "calls per second": len(added) / wall,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--model-ms", type=float, default=250.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = {
        "with a model": asyncio.run(measure(asked.episodes, asked.turns, asked.model_ms / 1000)),
        "without": asyncio.run(measure(asked.episodes, asked.turns, 0.0)),
    }
    if asked.json:
        print(json.dumps(found | {"episodes": asked.episodes, "target_ms": TARGET_MS}))
    else:
        names = list(found["without"])
        print(f"{'ms per call':14}" + "".join(f"{name:>18}" for name in names))
        for name, row in found.items():
            print(f"{name:14}" + "".join(f"{row[each]:>18,.2f}" for each in names))
    return int(found["with a model"]["cpu"] > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
