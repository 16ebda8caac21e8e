"""The protocol by definition and search, to be compared with the ledger that counts.

Nothing here counts deadlines: "schedulable" means that an assignment of groups to places was found by augmenting
paths, "the fewest" that all smaller subsets were tried. Slow on purpose, and meant to be read next to DESIGN's prose.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations


@dataclass
class Entry:
    version: int
    state: str
    order: int


@dataclass
class Oracle:
    batch_size: int
    max_staleness: int
    redundancy: int
    version: int = 0
    groups: dict[str, Entry] = field(default_factory=dict)
    order: int = 0
    admitted: int = 0
    committed: int = 0
    released: dict[str, int] = field(default_factory=dict)

    @property
    def places(self) -> int:
        return self.batch_size + self.redundancy

    @property
    def leased(self) -> list[str]:
        return self.named("leased")

    @property
    def full(self) -> bool:
        return len(self.leased) == self.batch_size

    @property
    def frontier(self) -> int:
        return self.version + self.full

    @property
    def open_taken(self) -> int:
        return 0 if self.full else len(self.leased)

    def named(self, *states: str) -> list[str]:
        found = [name for name, entry in self.groups.items() if entry.state in states]
        return sorted(found, key=lambda name: self.groups[name].order)

    def deadline(self, group: str) -> int:
        return self.groups[group].version + self.max_staleness

    def due(self, groups: Iterable[str]) -> list[int]:
        return [self.deadline(group) for group in groups]

    def servable(self, deadlines: Iterable[int], first: int, gone: int = 0) -> int:
        """The most groups that can be trained from step ``first`` on, with ``gone`` of its places used."""
        return most_placed(tuple(sorted(deadline - first for deadline in deadlines)), self.places, gone)

    def schedulable(self, deadlines: Iterable[int], first: int, gone: int = 0) -> bool:
        deadlines = list(deadlines)
        return self.servable(deadlines, first, gone) == len(deadlines)

    def live(self) -> list[str]:
        return self.named("in flight", "complete")

    def can_reserve(self, version: int, more: int = 1) -> bool:
        deadlines = [*self.due(self.live()), *[version + self.max_staleness] * more]
        return self.schedulable(deadlines, self.frontier, self.open_taken)

    def room(self, version: int) -> int:
        room = 0
        while self.can_reserve(version, room + 1):
            room += 1
        return room

    def reserve(self, group: str, version: int) -> bool:
        if not self.can_reserve(version):
            return False
        self.order += 1
        self.admitted += 1
        self.groups[group] = Entry(version, "in flight", self.order)
        return True

    def lower(self, group: str, version: int) -> bool:
        if version >= self.groups[group].version:
            return True
        others = [name for name in self.live() if name != group]
        deadlines = [*self.due(others), version + self.max_staleness]
        if not self.schedulable(deadlines, self.frontier, self.open_taken):
            return False
        self.groups[group].version = version
        return True

    def renew(self, group: str, version: int) -> None:
        self.groups[group].version = version

    def occupy(self, group: str) -> None:
        self.order += 1
        self.groups[group] = Entry(self.groups[group].version, "complete", self.order)

    def release(self, group: str, reason: str) -> None:
        del self.groups[group]
        self.released[reason] = self.released.get(reason, 0) + 1

    def candidates(self) -> list[str]:
        """Complete groups, earliest deadline first, then in the order of completion."""
        return sorted(self.named("complete"), key=self.deadline)

    def take(self, limit: int | None) -> list[str]:
        taken: list[str] = []
        while not self.full and self.candidates() and (limit is None or len(taken) < limit):
            group = self.candidates()[0]
            rest = self.due(name for name in self.live() if name != group)
            last = self.open_taken + 1 == self.batch_size
            if not (
                self.schedulable(rest, self.frontier + 1)
                if last
                else self.schedulable(rest, self.frontier, self.open_taken + 1)
            ):
                break
            self.groups[group].state = "leased"
            taken.append(group)
        return taken

    def going(self) -> list[str] | None:
        """What would fill the open step, or None if there is not enough."""
        missing = self.batch_size - len(self.leased)
        return None if self.full or len(self.candidates()) < missing else self.candidates()[:missing]

    def surplus(self, rank: Callable[[str], float]) -> set[str] | None:
        """The fewest groups to give up for the open step to be filled now, the best by rank; None if not possible."""
        going = self.going()
        if going is None:
            return None
        rest = [name for name in self.live() if name not in going]

        def key(name: str) -> tuple[bool, float, int]:
            complete = self.groups[name].state == "complete"
            return complete, 0 if complete else rank(name), -self.groups[name].order

        for size in range(self.redundancy + 1):
            fitting = [
                lost
                for lost in combinations(rest, size)
                if self.schedulable(self.due(set(rest) - set(lost)), self.frontier + 1)
            ]
            if fitting:
                return set(min(fitting, key=lambda lost: sorted(map(key, lost))))
        return None

    def ready(self) -> bool:
        return self.surplus(lambda _: 0) is not None

    def consume(self, rank: Callable[[str], float]) -> tuple[list[str], set[str]]:
        going, surplus = self.going(), self.surplus(rank)
        assert going is not None
        assert surplus is not None
        for name in surplus:
            self.release(name, "redundant")
        for name in going:
            self.groups[name].state = "leased"
        return sorted(self.leased, key=self.deadline), surplus

    def commit(self) -> None:
        for name in self.leased:
            del self.groups[name]
        self.committed += self.batch_size
        self.version += 1

    def rollback(self) -> None:
        for name in self.leased:
            self.groups[name].state = "complete"

    def blocking(self) -> set[str]:
        """Groups in flight each of which, once finished, brings the open step nearer to being ready."""
        waiting = self.named("in flight")

        def to_wait_for(groups: list[str]) -> int:
            return max(0, len(groups) - self.servable(self.due(groups), self.frontier + 1) - self.redundancy)

        return {
            group
            for group in waiting
            if to_wait_for([name for name in waiting if name != group]) < to_wait_for(waiting)
        }


@cache
def most_placed(deadlines: tuple[int, ...], places: int, gone: int) -> int:
    """Maximum matching of groups to places of steps 0, 1, ..., by augmenting paths; step 0 lacks ``gone`` places."""
    owner: dict[tuple[int, int], int] = {}

    def place(group: int, seen: set[tuple[int, int]]) -> bool:
        for step in range(deadlines[group] + 1):
            for number in range(0 if step else gone, places):
                if (step, number) not in seen:
                    seen.add((step, number))
                    if (step, number) not in owner or place(owner[step, number], seen):
                        owner[step, number] = group
                        return True
        return False

    return sum(place(group, set()) for group in range(len(deadlines)))
