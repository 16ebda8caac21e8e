"""A step launched before the last one's tokens are known changes nothing that anyone can see."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.rollout.attention import Layout
from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import Request, Sampling, StepOutput
from tests.rollout.conftest import Tiny, prompt


class EagerFlight:
    def __init__(self, logits: torch.Tensor, tokens: list[int], logprobs: list[float]) -> None:
        self.logits, self._drawn = logits, (tokens, logprobs)

    def collect(self) -> tuple[list[int], list[float]]:
        return self._drawn


class EagerGraphs:
    """What ``DecodeGraphs`` does on a GPU, at once and on the CPU."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.last = np.zeros(0, np.int64)
        self.blind = 0

    def launch(self, tokens: Any, positions: Any, tables: Any, uniforms: Any, temperatures: Any) -> EagerFlight:
        engine, count = self.engine, len(positions)
        if (tokens < 0).all():
            self.blind += 1
            tokens = self.last[-1 - tokens]
        size = engine.pool.page_size
        slots = tables[np.arange(count), positions // size] * size + positions % size
        order = np.argsort(-positions, kind="stable")
        engine.attention.begin(Layout(slots[order], tables[order], positions[order] + 1, []))
        asked = torch.from_numpy(tokens[order]), torch.from_numpy(positions[order])
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        logits = engine.model.forward(*asked, engine.attention, None)[back]
        heat = torch.from_numpy(np.where(temperatures == 0, 1, temperatures))[:, None]
        every = torch.log_softmax(logits / heat, -1)
        upto = every.exp().double().cumsum(-1)
        drawn = (upto <= torch.from_numpy(uniforms)[:, None] * upto[:, -1:]).sum(-1).clamp_max(logits.shape[1] - 1)
        drawn = torch.where(torch.from_numpy(temperatures) == 0, logits.argmax(-1), drawn)
        self.last = drawn.numpy().copy()
        return EagerFlight(logits, drawn.tolist(), every.gather(1, drawn[:, None])[:, 0].tolist())


def script(engine: TorchEngine, tensors: list[dict[str, torch.Tensor]], seed: int) -> list[tuple[int, StepOutput]]:
    """Random commands and steps; the same for every engine."""
    random, outputs, made = Random(seed), list[tuple[int, StepOutput]](), 0
    while made < 14 or engine.busy:
        act = random.random()
        if act < 0.06 and made < 14:
            # Whoever joins while a step is under way waits for the next one, which would shift all that follows.
            engine._land()
            sampling = Sampling(
                temperature=random.choice((0.0, 1.0, 0.7)),
                top_k=5 if random.random() < 0.1 else 0,
                max_tokens=random.randint(1, 80),
                stop_tokens=(random.randrange(96),),
            )
            engine.submit([Request(f"t{made}", 1, prompt(random.randint(1, 30), made), sampling=sampling)])
            made += 1
        elif act < 0.08:
            engine.interrupt([f"t{random.randrange(14)}"])
        elif act < 0.09:
            engine.abort([f"t{random.randrange(14)}"])
        elif act < 0.115:
            version = engine.version + 1
            new = tensors[version % len(tensors)]
            engine.pull(lambda into, new=new, version=version: copied(into, new, version), version)
        else:
            outputs.append((engine.version, engine.step()))
    assert engine.pool.used == 0
    return outputs


def copied(into: Any, tensors: dict[str, torch.Tensor], version: int) -> int:
    for name, tensor in into.items():
        tensor.copy_(tensors[name])
    return version


def seen(outputs: list[tuple[int, StepOutput]]) -> list[Any]:
    """All but the log-probabilities, which rounding may change."""
    return [
        (
            version,
            (output.made, output.prefilled),
            [(r.name, r.reason, r.tokens, r.spans, r.kv_version) for r in (*output.finished, *output.returned)],
        )
        for version, output in outputs
    ]


def logprobs(outputs: list[tuple[int, StepOutput]]) -> list[float]:
    results = [each for _, output in outputs for each in (*output.finished, *output.returned)]
    return [value for each in results for value in each.logprobs]


@pytest.mark.parametrize("kv_on_pull", ["recompute", "keep"])
@pytest.mark.parametrize("seed", range(6))
def test_steps_are_the_same_with_and_without_looking_ahead(
    tiny: Callable[..., Tiny], seed: int, kv_on_pull: str
) -> None:
    one, other = tiny("llama", 0), tiny("llama", 1)
    options = {"kv_tokens": 400 if seed % 2 else 2048, "max_running": 14, "kv_on_pull": kv_on_pull}
    plain, ahead = one.engine(**options), one.engine(**options)
    graphs = EagerGraphs(ahead)
    ahead._graphs = graphs  # type: ignore[assignment]
    tensors = [one.tensors(), other.tensors()]
    expected, outputs = script(plain, tensors, seed), script(ahead, tensors, seed)
    assert seen(outputs) == seen(expected)
    assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=1e-4)
    assert graphs.blind > 20, "it hardly ever looked ahead"


def test_the_step_after_an_end_is_launched_ahead_also_while_others_wait_for_a_row(tiny: Callable[..., Tiny]) -> None:
    one, random = tiny("llama", 0), Random(3)
    asked = [
        Request(f"t{at}", 1, prompt(1 + at % 9, at), sampling=Sampling(max_tokens=random.randint(1, 60)))
        for at in range(24)
    ]
    plain, ahead = one.engine(max_running=4), one.engine(max_running=4)
    graphs = EagerGraphs(ahead)
    ahead._graphs = graphs  # type: ignore[assignment]
    found: list[dict[str, Any]] = []
    steps = 0
    for engine in (plain, ahead):
        results: dict[str, Any] = {}
        engine.submit(asked)
        steps = 0
        while engine.busy:
            steps += 1
            results |= {each.name: (each.tokens, each.reason) for each in engine.step().finished}
        found.append(results)
    assert found[0] == found[1]
    assert len(found[1]) == len(asked)
    assert graphs.blind > 0.8 * (steps - len(asked)), "only who joins holds it up"


def test_who_waits_joins_when_enough_are_together_and_at_once_if_nobody_runs(tiny: Callable[..., Tiny]) -> None:
    engine = tiny("llama", 0).engine(max_running=16)
    engine.scheduler.patience = 2.0

    def ask(*names: str) -> None:
        sampling = Sampling(max_tokens=30, temperature=0.0)
        engine.submit([Request(name, 1, prompt(5, at), sampling=sampling) for at, name in enumerate(names)])

    ask("a")
    assert [engine.step().prefilled > 0 for _ in range(2)] == [True, False], "nobody runs"
    ask("b")
    steps = [engine.step() for _ in range(6)]
    assert [step.made for step in steps] == [1, 1, 1, 1, 2, 2], "it misses half of each step"
    ask("c", "d", "e", "f")
    assert [engine.step().made for _ in range(4)] == [2, 2, 2, 6], "they miss two thirds of each"
    assert engine.scheduler.running.keys() == set("abcdef")
