"""Measure what decoding steps of the built-in engine take on this machine, and fit the coordinator's cost model.

Each cell of a grid runs a number of sequences with a length of context. Prompts are assumed to be computed, because KV
entries of any value take the same time. Cells are visited in random order, several times, and the lower quartile of
their steps counts: other work on the machine can only make a step longer. ::

    profile = measure(engine, Grid(running=(1, 4, 16), contexts=(64, 512)))
    profile.model, profile.errors
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import EngineError, Request, Sampling
from staleflow.rollout.fit import Point, Profile, fit

WARM_STEPS, LEAST_STEPS, MOST_STEPS = 3, 8, 40
VISIT_S = 0.06
"""Seconds that each visit of a cell lasts, within its limits of steps."""
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Grid:
    running: tuple[int, ...]
    contexts: tuple[int, ...]
    """Tokens of each sequence."""

    @classmethod
    def up_to(cls, running: int, context: int) -> "Grid":
        """Powers of two sequences, and contexts that grow by a factor of four."""
        return cls(_steps(running, 1, 2), _steps(context, 64, 4))


def _steps(most: int, first: int, factor: int) -> tuple[int, ...]:
    found = [min(first, most)]
    while found[-1] < most:
        found.append(min(found[-1] * factor, most))
    return tuple(found)


def measure(engine: TorchEngine, grid: Grid, on_share: Callable[[float], None] = lambda _: None) -> Profile:
    """Visit every cell that fits into the engine. ``on_share`` gets the share that is done after each."""
    cells = [
        (running, context)
        for running in grid.running
        for context in grid.contexts
        if running <= engine.options.max_running and running * pages(engine, context) <= engine.pool.total * 0.9
    ]
    if len(cells) < 4 or len({running for running, _ in cells}) < 2:
        raise EngineError(
            f"only {len(cells)} cells of the grid fit into {engine.options.kv_tokens} tokens of KV memory and "
            f"{engine.options.max_running} sequences: raise kv_tokens, or ask for less context"
        )
    seen: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    random = Random(1)
    for turn in range(ROUNDS):
        random.shuffle(cells)
        for at, cell in enumerate(cells):
            seen[cell] += _decode(engine, *cell)
            on_share((turn * len(cells) + at + 1) / (ROUNDS * len(cells)))
    points = [_point(*cell, times) for cell, times in sorted(seen.items())]
    prefill = [(tokens, _prefill(engine, tokens)) for tokens in _prefill_sizes(engine)]
    (few, less), (many, more) = prefill[0], prefill[-1]
    model, errors = fit(points, max(0.0, (more - less) / (many - few)))
    return Profile(model, errors, points, prefill)


def pages(engine: TorchEngine, context: int) -> int:
    return engine.pool.pages_for(context + WARM_STEPS + MOST_STEPS + 2)


def _decode(engine: TorchEngine, running: int, context: int) -> list[float]:
    prompt = [1] * context
    names = [f"profile {at}" for at in range(running)]
    engine.submit([Request(name, 1, prompt, sampling=Sampling(max_tokens=10**9)) for name in names])
    engine.scheduler.assume_computed()
    times: list[float] = []
    while len(times) < WARM_STEPS + LEAST_STEPS or (sum(times) < VISIT_S and len(times) < WARM_STEPS + MOST_STEPS):
        began = time.perf_counter()
        made = engine.step().made
        times.append(time.perf_counter() - began)
        assert made == running, "a sequence did not decode"
    engine.abort(names)
    engine.pool.forget()
    return times[WARM_STEPS:]


def _point(running: int, context: int, times: list[float]) -> Point:
    grown = context + WARM_STEPS + len(times) // ROUNDS // 2
    return Point(running, running * grown, statistics.quantiles(times, n=4)[0])


def _prefill_sizes(engine: TorchEngine) -> tuple[int, int]:
    most = min(engine.options.prefill_tokens, engine.capacity - 2)
    return max(1, most // 4), most


def _prefill(engine: TorchEngine, tokens: int) -> float:
    times: list[float] = []
    for turn in range(ROUNDS + 1):
        engine.submit([Request("profile", 1, [turn + 1] * tokens, sampling=Sampling(max_tokens=2))])
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
        engine.abort(["profile"])
        engine.pool.forget()
    return statistics.median(times[1:])
