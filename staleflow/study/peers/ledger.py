"""What the ledgers of all peers have in common: which groups are live, complete and leased.

A peer takes the place of the staleness ledger, so everything else of a run (trajectory server, routing, engines,
trainer, workload) is the same for all. It answers two questions, and neither answer promises a bound:

``quota``  how many more groups may be started now, on the newest version;
``pick``   which complete groups the open step may train now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from staleflow.protocol.ledger import LedgerError
from staleflow.protocol.schedule import LiveGroup
from staleflow.types import Batch, LedgerCounts, StepView


class PeerLedger:
    """A ``staleflow.protocol.Ledger`` whose admission and consumption are the two questions."""

    def __init__(self, batch_size: int, max_staleness: int, redundancy: int = 0) -> None:
        if redundancy:
            raise LedgerError(f"redundancy={redundancy} is not what this policy does; compare it with redundancy=0")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.redundancy = redundancy
        self.version = 0
        self.groups: dict[str, LiveGroup] = {}
        """All live groups."""
        self.in_flight: dict[str, LiveGroup] = {}
        self.complete: dict[str, LiveGroup] = {}
        """Complete groups, in the order of completion."""
        self.leased: list[LiveGroup] = []
        self.committed = 0
        self.released: dict[str, int] = {}
        self._order = 0

    def quota(self) -> int:
        """Groups that may start now: by default as many as the steps up to the bound have places for."""
        return (self.version + self.max_staleness + 1) * self.batch_size - self.admitted

    def pick(self) -> list[LiveGroup]:
        """Groups the open step may train now: by default all complete ones, the oldest version first."""
        return sorted(self.complete.values(), key=lambda group: (group.deadline, group.order))

    @property
    def admitted(self) -> int:
        """Groups that were reserved and not released."""
        return self.committed + len(self.groups)

    @property
    def taken(self) -> int:
        return len(self.leased)

    @property
    def frontier(self) -> int:
        return self.version + (self.taken == self.batch_size)

    # Admission

    def room(self, version: int) -> int:
        return max(0, self.quota()) if version == self.version else 0

    def can_reserve(self, version: int) -> bool:
        return self.room(version) > 0

    def reserve(self, group: str, version: int) -> bool:
        if self.room(version) <= 0:
            return False
        self._order += 1
        self.groups[group] = self.in_flight[group] = LiveGroup(group, version + self.max_staleness, self._order)
        return True

    def lower(self, group: str, version: int) -> bool:
        self.groups[group].deadline = min(self.groups[group].deadline, version + self.max_staleness)
        return True

    def renew(self, group: str, version: int) -> None:
        self.groups[group].deadline = max(self.groups[group].deadline, version + self.max_staleness)

    def occupy(self, group: str) -> None:
        self._order += 1
        self.complete[group] = entry = self.in_flight.pop(group)
        entry.order, entry.state = self._order, "complete"

    def release(self, group: str, reason: str) -> None:
        if group not in self.in_flight and group not in self.complete:
            raise LedgerError(f"release: group {group!r} is not live, or leased; roll its step back first")
        self.in_flight.pop(group, None)
        self.complete.pop(group, None)
        del self.groups[group]
        self.released[reason] = self.released.get(reason, 0) + 1

    # Consumption

    def take(self, limit: int | None = None) -> list[str]:
        if self.taken == self.batch_size:
            return []
        most = self.batch_size - self.taken
        groups = self.pick()[: most if limit is None else min(limit, most)]
        for group in groups:
            group.state = "leased"
            self.leased.append(self.complete.pop(group.name))
        return [group.name for group in groups]

    def ready(self) -> bool:
        missing = self.batch_size - self.taken
        return 0 < missing <= len(self.complete) and missing <= len(self.pick())

    def consume(self, rank: Callable[[str], float] | None = None) -> Batch:  # noqa: ARG002  # nothing is given up
        step = self.version
        self.take()
        return Batch(step, [group.name for group in self.leased], [])

    def commit(self, step: int) -> None:  # noqa: ARG002  # there is only one that can be meant
        for group in self.leased:
            del self.groups[group.name]
        self.committed += self.taken
        self.leased = []
        self.version += 1

    def rollback(self, step: int) -> None:  # noqa: ARG002
        for group in self.leased:
            group.state = "complete"
        self.complete = {group.name: group for group in self.leased} | self.complete
        self.leased = []

    # For people

    def blocking(self) -> list[str]:
        """Nothing is waited for by name: the open step takes whatever is complete."""
        return []

    def blocked(self) -> tuple[int, object]:
        names = self.blocking()
        return len(names), names

    def view(self) -> list[StepView]:
        return []

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted=self.admitted + sum(self.released.values()),
            live=len(self.groups),
            complete=len(self.complete),
            leased=self.taken,
            committed=self.committed,
            released=dict(self.released),
        )

    def to_state(self) -> dict[str, Any]:
        """The live groups, which the invariants compare with the server's."""
        entries = self.groups.values()
        return {"groups": [[entry.name, entry.deadline - self.max_staleness, entry.state] for entry in entries]}
