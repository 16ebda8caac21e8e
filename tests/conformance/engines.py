"""Engines to hold to the interface. A new one is one entry of ``KINDS``; every test here then runs over it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from staleflow.coordinator.cost import CostModel
from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import Engine, Request, Result, Sampling
from staleflow.rollout.options import EngineOptions
from staleflow.simulate.engine import SimEngine
from staleflow.simulate.instance import Instance
from staleflow.types import Spans

KV_TOKENS, MAX_RUNNING, PAGE = 256, 4, 8
VLLM_DEVICE = os.environ.get("STALEFLOW_TEST_VLLM_DEVICE", "cpu")
VLLM_ROUNDING = 2e-4 if VLLM_DEVICE == "cpu" else 3e-2
"""Of log-probabilities: on a GPU its attention in float32 has the precision of TF32. Weights of another version change
them by units."""
COST = CostModel(0.01, 0.005, 0.001, 0.001, 1e-7, 1e-5)


@dataclass(frozen=True)
class Kind:
    """How to make an engine with room for ``KV_TOKENS`` and ``MAX_RUNNING``, at version 0."""

    make: Callable[[Path], Engine]
    payload: bool = True
    """Whether it makes tokens; otherwise it only counts them."""
    repeatable: bool = True
    """Whether an interruption does not change what is drawn; otherwise only the likeliest tokens stay the same."""
    rounding: float = 1e-4
    """How far log-probabilities of the same tokens may be apart."""
    missing: str | None = None
    """Why it cannot be tested here."""


def built_in(folder: Path, **more: Any) -> Engine:
    options: dict[str, Any] = {"kv_tokens": KV_TOKENS, "max_running": MAX_RUNNING, "page_size": PAGE, "threads": 1}
    return TorchEngine(folder, EngineOptions(**(options | more)), version=0)


def modelled(_: Path) -> Engine:
    return SimEngine(Instance(COST, KV_TOKENS // PAGE, PAGE, MAX_RUNNING, chunk=32))


def vllm(folder: Path, **more: Any) -> Engine:
    from tests.conformance.pooled_vllm import pooled

    return pooled(folder, EngineOptions(kv_tokens=KV_TOKENS, max_running=MAX_RUNNING, threads=1, **more), version=0)


NO_VLLM = None if find_spec("vllm") else "vLLM is not installed here: make test-vllm"

KINDS = {
    "built-in": Kind(built_in),
    "built-in, KV kept": Kind(lambda folder: built_in(folder, kv_on_pull="keep")),
    "modelled": Kind(modelled, payload=False),
    "vLLM": Kind(vllm, True, False, VLLM_ROUNDING, NO_VLLM),
    "vLLM, KV kept": Kind(lambda folder: vllm(folder, kv_on_pull="keep"), True, False, VLLM_ROUNDING, NO_VLLM),
}


class SameWeights:
    """A parameter server whose versions differ only in their number; ``ahead`` of what is asked for."""

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:  # noqa: ARG002
        return at_least + self.ahead


def request(name: str, prompt: int = 5, most: int = 30, group: str | None = None, epoch: int = 1) -> Request:
    seed = sum(map(ord, group or name))
    ids = [2 + (seed + at) % 7 for at in range(prompt)]
    return Request(name, epoch, ids, group=group, sampling=Sampling(max_tokens=most))


def resumed(original: Request, result: Result, epoch: int = 2) -> Request:
    """A request for the rest, on any engine; one that only counts gave no tokens and needs none."""
    tokens = result.tokens or range(count(result.spans))
    logprobs = result.logprobs or [0.0] * len(tokens)
    sampling, group = original.sampling, original.group
    return Request(original.name, epoch, original.prompt, tokens, logprobs, result.spans, group, sampling)


def greedy(asked: Request) -> Request:
    return replace(asked, sampling=replace(asked.sampling, temperature=0.0))


def count(spans: Spans) -> int:
    return sum(tokens for _, tokens in spans)


def made(engine: Engine, name: str) -> int:
    part = engine.peek(name, 0)
    return 0 if part is None else count(part.spans)


def drained(engine: Engine) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for _ in range(10_000):
        if not engine.busy:
            return found
        found |= {result.name: result for result in engine.step().finished}
    raise AssertionError("the engine does not come to an end")
