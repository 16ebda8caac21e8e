"""What things took in this run, as its own processes measured them: the run's ``profile.json`` and a few means.

    costs.hear(report.costs)                 # an instance has measured steps, pulls and waits
    costs.profile(by_cpu=True)               # as ``staleflow profile`` writes it; None if too few steps were seen
    costs.means()                            # for the summary

How a step grows with its sequences is fitted to CPU seconds where engines run on CPUs, because other processes disturb
those least; then all of it is stretched to the seconds that went by. So the profile holds for processes that share
cores as these did, and ``cpu_share`` in it says how much of a core they had.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from staleflow.coordinator.cost import CostModel
from staleflow.rollout.fit import Point, Profile, fit
from staleflow.types import Cell, Costs
from staleflow.workers.meter import Key, key

LEAST_STEPS = 5
"""A cell with fewer says little."""
MOST_POINTS = 20
"""Those with most steps: leaving each out once takes time."""


class Mean:
    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def add(self, total: float, count: int = 1) -> None:
        self.count += count
        self.total += total

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class RunCosts:
    def __init__(self) -> None:
        self._cells: dict[Key, Cell] = {}
        self.pull = Mean()
        self.report = Mean()
        """From the end of a trajectory to the news of it."""
        self.reward = Mean()
        self.finish = Mean()
        """From the decision that a step is whole until the trainer is told: the journal comes first."""

    def hear(self, costs: Costs) -> None:
        for cell in costs.cells:
            which = key(cell.mixed, cell.running / cell.count, cell.context / cell.count)
            self._cells[which] = joined(self._cells.get(which), cell)
        self.pull.add(costs.pull_s, costs.pulls)
        self.report.add(costs.reported_s, costs.reported)

    def means(self) -> dict[str, float]:
        return {
            "pull_s": self.pull.value,
            "report_s": self.report.value,
            "reward_s": self.reward.value,
            "finish_s": self.finish.value,
            "instance_cpu_share": cpu_share(self._cells.values()),
        }

    def profile(self, by_cpu: bool) -> dict[str, Any] | None:
        cells = list(self._cells.values())
        try:
            return profiled(cells, by_cpu)
        except ValueError:  # too few to fit anything to
            return None


def joined(one: Cell | None, other: Cell) -> Cell:
    if one is None:
        return other
    return Cell(
        other.mixed,
        one.count + other.count,
        one.running + other.running,
        one.context + other.context,
        one.prefilled + other.prefilled,
        one.seconds + other.seconds,
        one.cpu_s + other.cpu_s,
    )


def cpu_share(cells: Iterable[Cell]) -> float:
    """CPU seconds of a second in a step; 1 if nothing was measured."""
    cells = list(cells)
    seconds = sum(cell.seconds for cell in cells)
    return sum(cell.cpu_s for cell in cells) / seconds if seconds else 1.0


def profiled(cells: list[Cell], by_cpu: bool) -> dict[str, Any]:
    """ValueError if there are too few."""
    decoding = [cell for cell in cells if not cell.mixed and cell.running]
    used = sorted((cell for cell in decoding if cell.count >= LEAST_STEPS), key=lambda cell: -cell.count)[:MOST_POINTS]
    share = cpu_share(cells) if by_cpu else 1.0
    points = [point_of(cell, _spent(cell, by_cpu) / cell.count / share) for cell in used]
    model, errors = fit(points)
    model = model.scaled(sum(_spent(cell, by_cpu) for cell in decoding) / share / _predicted(model, decoding))
    mixed = [cell for cell in cells if cell.mixed]
    prefilled = sum(cell.prefilled for cell in mixed)
    extra = sum(_spent(cell, by_cpu) for cell in mixed) / share - _predicted(model, mixed)
    model = replace(model, per_prefill_token=max(0.0, extra / prefilled) if prefilled else 0.0)
    profile = Profile(model, errors, sorted(points), [(prefilled, extra)])
    return profile.as_values() | {"steps": sum(cell.count for cell in cells), "cpu_share": cpu_share(cells)}


def point_of(cell: Cell, seconds: float) -> Point:
    return Point(round(cell.running / cell.count), round(cell.context / cell.count), seconds)


def _spent(cell: Cell, by_cpu: bool) -> float:
    return cell.cpu_s if by_cpu else cell.seconds


def _predicted(model: CostModel, cells: list[Cell]) -> float:
    """Seconds that the model gives these steps without their prefill."""
    return sum(cell.count * model.step(*point_of(cell, 0.0)[:2]) for cell in cells)
