"""Spans against an independent log of which weights made which token: the tokens themselves.

The model of version v is made to say nothing but token v. Whatever is done to the engines, and wherever a request is
resumed, its spans must repeat what its tokens say."""

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import Engine, Request, Result, Sampling
from staleflow.rollout.options import EngineOptions
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.types import Spans
from tests.conformance.engines import resumed
from tests.vllm.conftest import VOCABULARY, model_of, weights_of

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")


OFTEN = {"submit": 9, "resume": 9, "step": 50, "interrupt": 9, "abort": 3, "push": 5, "pull": 9}
"""How often each operation is chosen."""


def speaker(version: int) -> dict[str, torch.Tensor]:
    """Weights with which every next token is the version's number, modulo the vocabulary."""
    weights = {name: tensor.clone() for name, tensor in mute().items()}
    weights["lm_head.weight"][version % VOCABULARY] = 1.0
    return weights


@cache
def mute() -> dict[str, torch.Tensor]:
    weights = weights_of(model_of("llama", 0))
    for name, tensor in weights.items():
        if "norm" in name or "embed" in name:
            tensor.fill_(1.0)
        elif "o_proj" in name or "down_proj" in name or "lm_head" in name:
            tensor.zero_()
    return weights


class Fleet:
    """Two vLLM engines and a built-in one, with everything that can be done to them."""

    def __init__(self, engines: list[Engine], store: LocalParameterServer, seed: int, temperature: float) -> None:
        self.engines = engines
        self.temperature = temperature
        self.random = Random(seed)
        self.store = store
        self.pushed = 0
        self.asked: dict[str, Request] = {}
        self.where: dict[str, int] = {}
        self.back: dict[str, Result] = {}
        self.checked = self.ended = self.count = 0
        self.several = 0
        """Steps that drew more tokens than there were requests."""

    def check(self, tokens: list[int], spans: Spans) -> None:
        said = [version % VOCABULARY for version, count in spans for _ in range(count)]
        assert tokens == said
        self.checked += len(tokens)

    def act(self) -> None:
        random, at = self.random, self.random.randrange(len(self.engines))
        engine = self.engines[at]
        here = [name for name, where in self.where.items() if where == at]
        match random.choices([*OFTEN], [*OFTEN.values()])[0]:
            case "submit" if len(self.where) < 24:
                self.count += 1
                group = random.choice([None, "g1", "g2"])
                prompt = [2 + len(group or "") + each % 7 for each in range(random.randint(1, 90))]
                sampling = Sampling(max_tokens=random.randint(1, 40), temperature=self.temperature)
                one = Request(f"t{self.count}", 1, prompt, group=group, sampling=sampling)
                self.asked[one.name], self.where[one.name] = one, at
                engine.submit([one])
            case "resume" if self.back:
                name, result = self.back.popitem()
                self.where[name] = at
                engine.submit([resumed(self.asked[name], result, result.epoch + 1)])
            case "step":
                self.step(at)
            case "interrupt" if here:
                engine.interrupt(random.sample(here, min(len(here), 2)))
                self.step(at)
            case "abort" if here:
                name = random.choice(here)
                engine.abort([name])
                del self.where[name]
            case "push":
                self.pushed += random.randint(1, 3)
                self.store.push(self.pushed, speaker(self.pushed))
            case "pull":
                assert engine.pull(self.store, random.randint(0, self.pushed)) == self.pushed

    def step(self, at: int) -> None:
        now = self.engines[at].snapshot()
        output = self.engines[at].step()
        assert not output.failed
        self.several += output.made > now.running + now.waiting
        for result in (*output.finished, *output.returned):
            assert self.where.pop(result.name) == at
            self.check(result.tokens, result.spans)
        self.back |= {result.name: result for result in output.returned}
        for result in output.finished:
            assert len(result.tokens) == self.asked[result.name].sampling.max_tokens
            self.ended += 1
        for name, where in self.where.items():
            if where == at and (part := self.engines[at].peek(name, 0)) is not None:
                self.check(part.tokens, part.spans)


@pytest.mark.parametrize("on_pull", ["recompute", "keep"])
@pytest.mark.parametrize("operations", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_spans_repeat_what_the_tokens_say_over_random_operations(
    on_pull: Any, operations: int, tmp_path: Path, store: LocalParameterServer, capfd: pytest.CaptureFixture[str]
) -> None:
    said = walk(on_pull, operations, tmp_path, store, engines=2)
    with capfd.disabled():
        print(f"\n{said}")


def walk(
    on_pull: Any,
    operations: int,
    folder: Path,
    store: LocalParameterServer,
    engines: int,
    temperature: float = 1.0,
    **more: Any,
) -> str:
    """With this many vLLM engines and a built-in one. Returns what happened."""
    from tests.conformance.pooled_vllm import pooled

    model_of("llama", 0).save_pretrained(folder / "model")
    options = EngineOptions(kv_tokens=256, max_running=6, prefill_tokens=48, threads=1, kv_on_pull=on_pull)
    store.push(0, speaker(0))
    made: list[Any] = [pooled(folder / "model", options, version=-1, **more) for _ in range(engines)]
    fleet = Fleet([*made, TorchEngine(folder / "model", options, version=-1)], store, operations, temperature)
    for engine in fleet.engines:
        engine.pull(store, 0)
    for _ in range(operations):
        fleet.act()
    assert fleet.ended > operations / 50
    for engine in fleet.engines:
        engine.close()
    return (
        f"{operations} operations, KV {on_pull}: {fleet.ended} ended of {fleet.count}, {fleet.pushed} versions, "
        f"{fleet.checked} stamps compared, {fleet.several} steps with several tokens of one request, "
        f"{sum(each.preempted for each in made)} preemptions"
    )
