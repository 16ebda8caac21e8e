"""Live groups by deadline, and Hall's condition over them.

A schedule asks one question: can every live group still be trained by its deadline, ``places`` groups to a step from
the open step (the *frontier*) on? For unit jobs that is a matter of counting. With ``n(k)`` groups due by step ``k``
and ``taken`` places of the open step used, it can iff for every ``k >= frontier``::

    n(k) <= places * (k - frontier + 1) - taken

``places`` is the batch size plus the redundancy: the surplus that redundancy admits may be given up, at most
``redundancy`` groups for each step, when the step is filled.

Groups are kept in two lists indexed by deadline, ``[i]`` being due at ``frontier + i``. Nothing here checks its
callers: the ledger does.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import accumulate, islice
from typing import Literal

GroupState = Literal["in flight", "complete", "leased"]


class LiveGroup:
    """One live group. ``order`` counts reservations while it is in flight, and completions from then on."""

    __slots__ = ("deadline", "name", "order", "state")

    def __init__(self, name: str, deadline: int, order: int, state: GroupState = "in flight") -> None:
        self.name = name
        self.deadline = deadline
        self.order = order
        self.state: GroupState = state


class Schedule:
    def __init__(self, batch_size: int, redundancy: int, horizon: int) -> None:
        self.batch_size = batch_size
        self.redundancy = redundancy
        self.places = batch_size + redundancy
        self.frontier = 0
        self.taken = 0
        """Places of the open step that are leased."""
        self.size = 0
        """Groups in the schedule."""
        self.in_flight: list[set[LiveGroup]] = [set() for _ in range(horizon)]
        self.complete: list[OrderedDict[int, LiveGroup]] = [OrderedDict() for _ in range(horizon)]
        """Complete groups of each deadline, by ``order`` and in that order."""
        self.joined = [0] * horizon
        """How often a group in flight was put in, by deadline."""

    def add(self, group: LiveGroup) -> None:
        """Put the group in; a complete one behind the others of its deadline."""
        index = group.deadline - self.frontier
        if group.state == "complete":
            self.complete[index][group.order] = group
        else:
            self.in_flight[index].add(group)
            self.joined[index] += 1
        self.size += 1

    def remove(self, group: LiveGroup) -> None:
        index = group.deadline - self.frontier
        if group.state == "complete":
            del self.complete[index][group.order]
        else:
            self.in_flight[index].remove(group)
        self.size -= 1

    def free(self, first: int, last: int | None = None) -> int:
        """The fewest places left up to any deadline from step ``first`` to step ``last`` (default: without end)."""
        index = len(self.in_flight) - 1
        free = self.places * (index + 1) - self.taken - self.size
        while last is not None and index > last - self.frontier:
            free -= self.places - len(self.in_flight[index]) - len(self.complete[index])
            index -= 1
        least = free
        while index > first - self.frontier:
            free -= self.places - len(self.in_flight[index]) - len(self.complete[index])
            index -= 1
            least = min(least, free)
        return least

    def missing(self) -> int:
        """How many complete groups the open step still lacks."""
        return max(0, self.batch_size - self.taken - sum(map(len, self.complete)))

    def blocked(self) -> int:
        """How many deadlines, from the frontier on, hold the groups in flight that the open step waits for.

        Later steps have ``places * i`` places up to deadline ``i``. What does not fit there must finish now, except
        ``redundancy`` groups that may be given up: any of the groups due by then, unless earlier ones suffice.
        """
        blocked, most = 0, self.redundancy
        for index, waiting in enumerate(accumulate(map(len, self.in_flight))):
            if waiting - self.places * index > most:
                blocked, most = index + 1, waiting - self.places * index
        return blocked

    def excess(self) -> int:
        """How many groups would have to be given up if the open step were filled now."""
        return max(0, *(rest - self.places * index for index, rest in enumerate(self._rests())))

    def takeable(self, limit: int | None = None) -> int:
        """How many complete groups, ``limit`` at most, may go to the open step without giving one up.

        Earliest deadline first. A group may go while every deadline before its own has a place to spare: the place
        that it uses up could have served a group in flight that is due earlier.
        """
        spare = self.batch_size - self.taken
        if self.redundancy and self.excess():
            spare -= 1  # filling the step would give groups up
        if limit is not None:
            spare = min(spare, limit)
        count, free = 0, -self.taken
        for in_flight, complete in zip(self.in_flight, self.complete, strict=True):
            going = min(len(complete), spare)
            count += going
            free += self.places - len(in_flight) - len(complete)
            spare = min(spare - going, free)
            if not spare:
                break
        return count

    def surplus(self, rank: Callable[[str], float]) -> list[LiveGroup]:
        """The fewest groups whose release makes the rest schedulable once the open step is filled.

        Up to each deadline, earliest first, the best candidates due by then: the pools are nested, so that is optimal
        for any ranking. The scan costs O(live groups) per step, which trains about one in ``horizon`` of them.
        """
        missing = self.batch_size - self.taken
        surplus: list[LiveGroup] = []
        pool: list[tuple[bool, float, int, LiveGroup]] = []
        excess = self.excess()
        for index, rest in enumerate(self._rests()):
            if len(surplus) == excess:
                break
            staying = islice(self.complete[index].values(), missing, None)
            missing -= min(missing, len(self.complete[index]))
            for group in self.in_flight[index]:
                heappush(pool, (False, rank(group.name), -group.order, group))
            for group in staying:
                heappush(pool, (True, 0, -group.order, group))
            while rest - len(surplus) > self.places * index:
                surplus.append(heappop(pool)[-1])
        return surplus

    def lease(self, count: int) -> list[LiveGroup]:
        """Hand the ``count`` complete groups with the earliest deadlines to the open step; a full step is closed."""
        leased: list[LiveGroup] = []
        for complete in self.complete:
            for _ in range(min(len(complete), count - len(leased))):
                group = complete.popitem(last=False)[1]
                group.state = "leased"
                leased.append(group)
            if len(leased) == count:
                break
        self.size -= count
        self.taken += count
        if self.taken == self.batch_size:
            self._shift(1)
            self.taken = 0
        return leased

    def unlease(self, step: int, groups: list[LiveGroup]) -> None:
        """Undo all leases of ``step``. They were complete before those that stayed, so they go in front."""
        if self.frontier > step:
            self._shift(-1)
        self.taken = 0
        for group in sorted(groups, key=lambda group: -group.order):
            group.state = "complete"
            self.add(group)
            self.complete[group.deadline - self.frontier].move_to_end(group.order, last=False)

    def resume(self, step: int, taken: int) -> None:
        """Start at ``step`` with ``taken`` of its places leased; a full step is closed."""
        full = taken == self.batch_size
        self.frontier, self.taken = (step + 1, 0) if full else (step, taken)

    def _rests(self) -> Iterator[int]:
        """For each deadline: the groups due by then that would stay if the open step were filled now."""
        missing, rest = self.batch_size - self.taken, 0
        for in_flight, complete in zip(self.in_flight, self.complete, strict=True):
            going = min(len(complete), missing)
            missing -= going
            rest += len(in_flight) + len(complete) - going
            yield rest

    def _shift(self, steps: int) -> None:
        """Move the frontier by one step. The deadline that leaves the window is empty: Hall's condition says so."""
        leaving, entering = (0, len(self.in_flight)) if steps > 0 else (-1, 0)
        self.in_flight.insert(entering, self.in_flight.pop(leaving))
        self.complete.insert(entering, self.complete.pop(leaving))
        self.joined.insert(entering, self.joined.pop(leaving))
        self.frontier += steps
