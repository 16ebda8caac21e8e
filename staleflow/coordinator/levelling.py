"""Which trajectories change places while their instances pull.

A step waits for the slowest of its long trajectories, and how fast one decodes depends on the contexts beside it.
Nobody knows at the start what will become long, so some instances end up with far more context than others. To even
that out costs a prefill for everything that moves, except at one moment: an instance that pulls prefills all it holds
again, and that costs no more elsewhere.

So among the instances that pull now, the one with the most context gives a trajectory to the one with the least, and so
on, until the two are nearly even or no trajectory would bring them closer. Only large ones move: there are few of them,
and what has run long will run long. Routing sees the contexts where they will be, and an instance that a move has
emptied is not filled up with fresh work before the moved trajectory has arrived at the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from staleflow.coordinator.situation import Fleet, Interrupt, Pull, Resident, Situation
from staleflow.coordinator.strategies import Strategies

NEARLY = 0.1
"""Even enough: the fullest and the emptiest differ by this share of the mean."""

MOST_MOVES = 256
"""Moves in one call."""


def level(situation: Situation, strategies: Strategies, pulls: Sequence[Pull]) -> tuple[list[Interrupt], Fleet]:
    """The interrupts, and the fleet as it will be once what they free has arrived."""
    fleet, names = situation.fleet.copy(), {pull.instance for pull in pulls}
    taking_part = np.array([name in names for name in fleet.names], dtype=bool) & fleet.alive & (fleet.waiting == 0)
    movable: dict[int, list[Resident]] = {}
    for resident in situation.movable:
        if taking_part[resident.instance]:
            movable.setdefault(resident.instance, []).append(resident)
    rows = np.flatnonzero(taking_part)
    contexts: dict[int, int] = dict(zip(rows.tolist(), fleet.context[rows].tolist(), strict=True))
    fullest, emptiest = _Ranking(contexts, -1), _Ranking(contexts, 1)
    total = sum(contexts.values())
    interrupts: list[Interrupt] = []
    while len(contexts) > 1 and len(interrupts) < MOST_MOVES:
        source, target = fullest.first(), emptiest.first()
        gap = contexts[source] - contexts[target]
        if gap <= NEARLY * (total / len(contexts)):
            break
        resident = _halving(movable.get(source, []), gap)
        if resident is None:
            total -= contexts.pop(source)
        elif fleet.kv_free[target] < resident.context + strategies.headroom or (
            fleet.running[target] >= fleet.max_running[target]
        ):
            total -= contexts.pop(target)
        else:
            movable[source].remove(resident)
            fleet.remove(source, resident.context)
            fleet.place(target, resident.context, strategies.headroom)
            interrupts.append(Interrupt(resident.trajectory, fleet.names[source], "levelling"))
            for row in (source, target):
                contexts[row] = int(fleet.context[row])
                fullest.changed(row)
                emptiest.changed(row)
    return interrupts, fleet


class _Ranking:
    """Rows by their context, of which few change: with thousands of instances, looking at all of them for each move
    would take most of the decision. Among equals the first row."""

    def __init__(self, contexts: dict[int, int], sign: int) -> None:
        self._contexts, self._sign = contexts, sign
        self._heap = [(sign * context, row) for row, context in contexts.items()]
        heapify(self._heap)

    def first(self) -> int:
        while True:
            key, row = self._heap[0]
            if self._contexts.get(row) == self._sign * key:
                return row
            heappop(self._heap)  # it has left, or has another context since

    def changed(self, row: int) -> None:
        heappush(self._heap, (self._sign * self._contexts[row], row))


def _halving(residents: Sequence[Resident], gap: int) -> Resident | None:
    """The one whose move comes nearest to closing the gap from both sides; None if none makes it smaller."""
    smaller = [resident for resident in residents if resident.context < gap]
    return min(smaller, key=lambda resident: abs(resident.context - gap / 2), default=None)
