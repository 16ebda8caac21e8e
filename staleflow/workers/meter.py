"""Measures the steps, pulls and reports of an instance, and sums them up: similar steps share a cell.

    meter = Meter(worker)
    meter.step()                                   # instead of worker.step()
    report = meter.report(everything=True)         # with what was measured since the last report

Cells are octaves of sequences and of context for each, so there are few of them however long a run lasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from staleflow.rollout.engine import StepOutput
from staleflow.types import Cell, Costs, Report

if TYPE_CHECKING:
    from staleflow.workers.rollout import RolloutWorker

Key = tuple[bool, int, int]


def key(mixed: bool, running: float, context: float) -> Key:
    """The cell of a step: steps with both numbers within the same factor of two share it."""
    return mixed, int(running).bit_length(), int(context / running).bit_length() if running else 0


class Cells:
    def __init__(self) -> None:
        self._sums: dict[Key, list[float]] = {}

    def add(self, output: StepOutput, seconds: float, cpu_s: float) -> None:
        made, prefilled, context = output.made, output.prefilled, output.context
        sums = self._sums.setdefault(key(prefilled > 0, made, context), [0, 0, 0, 0, 0.0, 0.0])
        for at, value in enumerate((1, made, context, prefilled, seconds, cpu_s)):
            sums[at] += value

    def drain(self) -> list[Cell]:
        sums, self._sums = self._sums, {}
        return [
            Cell(mixed, int(count), int(running), int(context), int(prefilled), seconds, cpu_s)
            for (mixed, _, _), (count, running, context, prefilled, seconds, cpu_s) in sums.items()
        ]


class Meter:
    def __init__(self, worker: RolloutWorker, clock: Callable[[], float] = time.perf_counter) -> None:
        self._worker = worker
        self._clock = clock
        self._cells = Cells()
        self._pulls, self._pull_s = 0, 0.0
        self._ended: list[tuple[int, float]] = []
        """Count and time of trajectories that finished and are not reported yet."""

    def step(self) -> None:
        began, cpu_began = self._clock(), time.thread_time()
        output = self._worker.step()
        now = self._clock()
        if output.finished:
            self._ended.append((len(output.finished), now))
        self._cells.add(output, now - began, time.thread_time() - cpu_began)

    def pull(self) -> None:
        began = self._clock()
        self._worker.pull()
        self._pulls += 1
        self._pull_s += self._clock() - began

    def report(self, everything: bool, holds: bool = False) -> Report:
        """The worker's report, with costs."""
        now = self._clock()
        reported = sum(count for count, _ in self._ended)
        waited = sum(count * (now - ended) for count, ended in self._ended)
        costs = Costs(self._cells.drain(), self._pulls, self._pull_s, reported, waited)
        self._pulls, self._pull_s, self._ended = 0, 0.0, []
        report = self._worker.report(everything, costs, holds, alive=True)
        assert report is not None
        return report
