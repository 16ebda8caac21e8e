"""Which trajectories come back to the server, to continue elsewhere: something waits for them, or they for memory.

Two reasons, and both move single trajectories, never a whole replica:

*thrashing*: an instance holds trajectories that it has no KV memory for. They are waiting inside, so taking them away
costs nothing; each is interrupted if another instance has the memory now.

*tail*: the open step has waited for its last trajectories for ``tail_patience`` of a step. One of the slowest is
interrupted if another instance would end it ``migration_speedup`` times sooner, re-prefill counted::

    stay = r * step(n, c)
    move = per_prefill_token * x + r * step(n' + 1, c' + x)
    stay / move >= migration_speedup

with ``x`` its context and ``r = max(mean_tokens, generated)`` the tokens it is expected to need still: lengths have
long tails, so what has run long will run long.

A target is alive, has a version not below the trajectory's, nothing waiting inside, a slot and the memory. What has
moved ``max_moves`` times stays.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from staleflow.coordinator.routing import most_routes
from staleflow.coordinator.situation import Fleet, Interrupt, Ints, Resident, Situation
from staleflow.coordinator.strategies import Strategies

MOST_MOVES = 4
"""Blockers moved in one call: each move changes what the next would gain, and the next call will see it."""
MOST_RELIEVED = 512
"""Trajectories without memory that one call moves, and no more than half of those that one decision places: they come
back to be placed, and what waits must not grow from one decision to the next."""


def gain(situation: Situation, strategies: Strategies) -> list[Interrupt]:
    step_s, since = situation.pace.step_s, situation.blocked_since
    patient = since is None or not step_s or situation.now - since < strategies.tail_patience * step_s
    if not situation.thrashing and (patient or not situation.blockers):
        return []
    fleet = situation.fleet.copy()
    relief = _relieve(situation, strategies, fleet)
    relieved = {interrupt.trajectory for interrupt in relief}
    blockers = [] if patient else [each for each in situation.blockers if each.trajectory not in relieved]
    return relief + _shorten_tail(situation, strategies, fleet, blockers)


def off(situation: Situation, strategies: Strategies) -> list[Interrupt]:  # noqa: ARG001
    return []


def _relieve(situation: Situation, strategies: Strategies, fleet: Fleet) -> list[Interrupt]:
    interrupts: list[Interrupt] = []
    if not situation.thrashing:
        return interrupts
    least = min(resident.context for resident in situation.thrashing) + strategies.headroom
    freest, excess = _Freest(fleet, least), fleet.waiting.tolist()
    most = max(1, min(MOST_RELIEVED, most_routes(len(fleet.names)) // 2))
    for resident in situation.thrashing:
        source = resident.instance  # which has some that wait, so it is no target
        if excess[source] <= 0 or resident.moves >= strategies.max_moves:
            continue
        target = freest.first(resident.version, resident.context + strategies.headroom)
        if target is None:
            continue
        # Counted in at the target, so that the next one does not rely on the same memory.
        fleet.place(target, resident.context, strategies.headroom)
        freest.changed(target)
        excess[source] -= 1
        interrupts.append(Interrupt(resident.trajectory, fleet.names[source], "thrashing"))
        if len(interrupts) == most:
            break
    return interrupts


class _Freest:
    """The instances that could take a trajectory, those with the most free memory first, by the version they hold:
    with thousands of them, looking at all for each trajectory would take most of the decision."""

    def __init__(self, fleet: Fleet, least: int) -> None:
        """``least``: with less memory than this an instance is of use to nobody."""
        self._fleet = fleet
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        takes = fleet.alive & (fleet.waiting == 0) & (fleet.running < fleet.max_running)
        rows = np.flatnonzero(takes & (fleet.kv_free >= least))
        each = zip(rows.tolist(), fleet.version[rows].tolist(), fleet.kv_free[rows].tolist(), strict=True)
        for row, version, free in each:
            self._heaps.setdefault(version, []).append((-free, row))
        for heap in self._heaps.values():
            heapify(heap)

    def first(self, version: int, tokens: int) -> int | None:
        """The one with the most free memory, if that is ``tokens``, among those that hold ``version`` or a newer one;
        among equals the first row."""
        tops = [heap[0] for held, heap in self._heaps.items() if held >= version and heap]
        free, row = min(tops, default=(0, -1))
        return row if row >= 0 and -free >= tokens else None

    def changed(self, row: int) -> None:
        """The first one of its version has taken a trajectory."""
        fleet, heap = self._fleet, self._heaps[int(self._fleet.version[row])]
        heappop(heap)
        if fleet.running[row] < fleet.max_running[row]:
            heappush(heap, (-int(fleet.kv_free[row]), row))


def _shorten_tail(
    situation: Situation, strategies: Strategies, fleet: Fleet, blockers: list[Resident]
) -> list[Interrupt]:
    if not blockers:
        return []
    times = (situation.cost.step_times(fleet.running, fleet.context) / fleet.speed).tolist()
    mean = situation.pace.mean_tokens

    def remaining(resident: Resident) -> float:
        return max(mean, resident.generated)

    movable = [one for one in blockers if one.moves < strategies.max_moves]
    movable.sort(key=lambda one: remaining(one) * times[one.instance], reverse=True)
    interrupts: list[Interrupt] = []
    for resident in movable[:MOST_MOVES]:
        target = _faster(situation, strategies, fleet, resident, remaining(resident))
        if target is not None:
            fleet.place(target, resident.context, strategies.headroom)
            fleet.running[resident.instance] -= 1
            fleet.context[resident.instance] -= resident.context
            interrupts.append(Interrupt(resident.trajectory, fleet.names[resident.instance], "tail"))
    return interrupts


def _faster(
    situation: Situation, strategies: Strategies, fleet: Fleet, resident: Resident, tokens: float
) -> int | None:
    """The row that would end the trajectory soonest, if that is soon enough."""
    cost, source = situation.cost, resident.instance
    targets = _targets(fleet, resident, strategies.headroom)
    if not len(targets):
        return None
    stay = tokens * cost.step(int(fleet.running[source]), int(fleet.context[source])) / fleet.speed[source]
    move = tokens * cost.step_times(fleet.running[targets] + 1, fleet.context[targets] + resident.context)
    move /= fleet.speed[targets]
    move += cost.per_prefill_token * resident.context + situation.pull_s * fleet.pulling[targets]
    best = int(move.argmin())
    worth = move[best] < stay and stay >= strategies.migration_speedup * move[best]
    return int(targets[best]) if worth else None


def _targets(fleet: Fleet, resident: Resident, headroom: int) -> Ints:
    """The rows that could take the trajectory, other than its own."""
    may = (
        fleet.alive
        & (fleet.version >= resident.version)
        & (fleet.waiting == 0)
        & (fleet.running < fleet.max_running)
        & (fleet.kv_free >= resident.context + headroom)
    )
    may[resident.instance] = False
    return np.flatnonzero(may)
