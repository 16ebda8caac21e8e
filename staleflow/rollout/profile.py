"""Measure what decoding steps of an engine take on this machine, and fit the coordinator's cost model.

Each cell of a grid runs a number of sequences with a length of context. The built-in engine assumes that prompts are
computed, because KV entries of any value take the same time; any other computes them before its cells are visited, and
finds them in its cache of prefixes if it has one. Cells are visited in random order, several times, and the lower
quartile of their steps counts: other work on the machine can only make a step longer. ::

    profile = measure(engine, options, Grid(running=(1, 4, 16), contexts=(64, 512)))
    profile.model, profile.errors
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import Engine, EngineError, Request, Sampling
from staleflow.rollout.fit import Point, Profile, fit
from staleflow.rollout.options import EngineOptions

WARM_STEPS, LEAST_STEPS, MOST_STEPS = 3, 8, 40
VISIT_S = 0.06
"""Seconds that each visit of a cell lasts, within its limits of steps."""
ROUNDS = 4
PREFILL_STEPS = 1000
"""Within these all sequences of a cell decode."""


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


def _too_few(cells: Sequence[tuple[int, int]]) -> bool:
    """For a fit."""
    return len(cells) < 4 or len({running for running, _ in cells}) < 2


def measure(
    engine: Engine, options: EngineOptions, grid: Grid, on_share: Callable[[float], None] = lambda _: None
) -> Profile:
    """Visit every cell that fits into the engine. ``on_share`` gets the share that is done after each."""
    room = engine.snapshot().kv_total * 0.9
    cells = [
        (running, context)
        for running in grid.running
        for context in grid.contexts
        if running <= options.max_running and running * _held(context, options.page_size) <= room
    ]
    if _too_few(cells):
        fits = f"only {len(cells)} cells of the grid fit into {options.kv_tokens} tokens of KV memory and "
        small = _too_few([(running, context) for running in grid.running for context in grid.contexts])
        fix = "ask for more sequences or longer contexts" if small else "raise kv_tokens, or ask for less context"
        raise EngineError(f"{fits}{options.max_running} sequences: {fix}")
    if not isinstance(engine, TorchEngine):
        for running, context in sorted(cells)[-len(grid.contexts) :]:  # the others are parts of these
            _run(engine, _requests(running, context, most=1))
    seen: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    random = Random(1)
    for turn in range(ROUNDS):
        random.shuffle(cells)
        for at, cell in enumerate(cells):
            seen[cell] += _decode(engine, *cell)
            on_share((turn * len(cells) + at + 1) / (ROUNDS * len(cells)))
    points = [_point(*cell, times) for cell, times in sorted(seen.items())]
    most = min(options.prefill_tokens, grid.contexts[-1])
    prefill = [(tokens, _prefill(engine, tokens)) for tokens in (max(1, most // 4), most)]
    (few, less), (many, more) = prefill
    model, errors = fit(points, max(0.0, (more - less) / max(1, many - few)))
    return Profile(model, errors, points, prefill)


def _held(context: int, page: int) -> int:
    """Tokens of KV memory that a sequence of a cell takes, in whole pages."""
    return -(-(context + WARM_STEPS + MOST_STEPS + 2) // page) * page


def _requests(running: int, context: int, most: int, first: int = 0) -> list[Request]:
    """With prompts that differ from the beginning, and of which a shorter one begins a longer one."""
    sampling = Sampling(max_tokens=most)
    return [Request(f"profile {at}", 1, _prompt(first + at, context), sampling=sampling) for at in range(running)]


def _prompt(number: int, length: int) -> list[int]:
    return [*map(int, f"{number:06}"), *[1] * length][:length]


def _run(engine: Engine, requests: Sequence[Request]) -> None:
    engine.submit(requests)
    while engine.busy:
        if failed := engine.step().failed:
            raise EngineError(failed[0].message)


def _decode(engine: Engine, running: int, context: int) -> list[float]:
    requests = _requests(running, context, most=10**9)
    engine.submit(requests)
    if isinstance(engine, TorchEngine):
        engine.scheduler.assume_computed()
    else:
        _start(engine, running)
    times: list[float] = []
    while len(times) < WARM_STEPS + LEAST_STEPS or (sum(times) < VISIT_S and len(times) < WARM_STEPS + MOST_STEPS):
        began = time.perf_counter()
        made = engine.step().made
        times.append(time.perf_counter() - began)
        assert made == running, "a sequence did not decode"
    engine.abort([each.name for each in requests])
    if isinstance(engine, TorchEngine):
        engine.pool.forget()
    return times[WARM_STEPS:]


def _start(engine: Engine, running: int) -> None:
    """Step until all decode."""
    for _ in range(PREFILL_STEPS):
        output = engine.step()
        if output.failed:
            raise EngineError(output.failed[0].message)
        if output.made == running:
            return
    raise EngineError(f"{running} sequences did not begin to decode in {PREFILL_STEPS} steps: ask for less context")


def _point(running: int, context: int, times: list[float]) -> Point:
    grown = context + WARM_STEPS + len(times) // ROUNDS // 2
    return Point(running, running * grown, statistics.quantiles(times, n=4)[0])


def _prefill(engine: Engine, tokens: int) -> float:
    times: list[float] = []
    for turn in range(ROUNDS + 1):
        (request,) = _requests(1, tokens, most=2, first=1000 * (turn + 1) + tokens % 1000)
        engine.submit([request])
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
        engine.abort([request.name])
    return statistics.median(times[1:])
