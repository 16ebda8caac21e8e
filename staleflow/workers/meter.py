"""What the steps of a working engine take, summed up where they are made: alike steps share a cell.

    meter.owe(tokens)                              # to be prefilled sooner or later
    meter.step(engine.snapshot(), made, seconds, cpu_s)
    costs = meter.drain()                          # what came since the last time; a few hundred bytes at most

Cells are octaves of sequences and of context for each, so there are few of them however long a run lasts.
"""

from __future__ import annotations

from staleflow.rollout.engine import EngineSnapshot
from staleflow.types import Cell, Costs

Key = tuple[bool, int, int]


def key(mixed: bool, running: float, context: float) -> Key:
    """Which steps are alike: both numbers within a factor of two."""
    return mixed, int(running).bit_length(), int(context / running).bit_length() if running else 0


class StepMeter:
    def __init__(self) -> None:
        self._cells: dict[Key, list[float]] = {}
        self._seen: object = None
        """The engine's latest step that only decoded, as far as it is known here."""
        self._owed = 0
        self._pulls, self._pull_s = 0, 0.0
        self._told, self._told_s = 0, 0.0

    def owe(self, tokens: int) -> None:
        """So many tokens are to be prefilled; counted with the next step that prefills."""
        self._owed += tokens

    def step(self, now: EngineSnapshot, made: int, seconds: float, cpu_s: float) -> None:
        """A step has drawn so many tokens. The engine says itself whether it did nothing else."""
        mixed, context, prefilled = now.step is self._seen, now.context, 0
        if now.step is not None and not mixed:
            _, context, _ = self._seen = now.step
        else:
            prefilled, self._owed = self._owed, 0
        sums = self._cells.setdefault(key(mixed, made, context), [0, 0, 0, 0, 0.0, 0.0])
        for at, value in enumerate((1, made, context, prefilled, seconds, cpu_s)):
            sums[at] += value

    def pulled(self, seconds: float) -> None:
        self._pulls += 1
        self._pull_s += seconds

    def told(self, count: int, seconds: float) -> None:
        """So many trajectories that had finished waited so long to be told of."""
        self._told += count
        self._told_s += count * seconds

    def drain(self) -> Costs:
        cells = [
            Cell(mixed, int(count), int(running), int(context), int(prefilled), seconds, cpu_s)
            for (mixed, _, _), (count, running, context, prefilled, seconds, cpu_s) in self._cells.items()
        ]
        costs = Costs(cells, self._pulls, self._pull_s, self._told, self._told_s)
        self._cells = {}
        self._pulls, self._pull_s, self._told, self._told_s = 0, 0.0, 0, 0.0
        return costs
