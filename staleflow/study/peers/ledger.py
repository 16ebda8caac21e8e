"""What the ledgers of all peers have in common: who is live, who is complete, who is leased.

A peer stands where the staleness ledger stands, so everything else of a run (trajectory server, routing, engines,
trainer, workload) is the same for all. It answers two questions, and neither answer promises a bound:

``quota``  how many more groups may be started now, on the newest version;
``pick``   which complete groups the open step may train now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from staleflow.protocol import StalenessLedger
from staleflow.protocol.ledger import LedgerError
from staleflow.protocol.schedule import Group
from staleflow.types import Batch, LedgerCounts, StepView


class PeerLedger(StalenessLedger):
    def __init__(self, batch_size: int, max_staleness: int, redundancy: int = 0) -> None:
        super().__init__(batch_size, max_staleness, redundancy)
        if redundancy:
            raise LedgerError(f"redundancy={redundancy} is not what this policy does; compare it with redundancy=0")
        self.in_flight: dict[str, Group] = {}
        self.complete: dict[str, Group] = {}
        """In the order of completion."""

    def quota(self) -> int:
        """By default as many as the steps up to the bound have places for."""
        return (self.version + self.max_staleness + 1) * self.batch_size - self.admitted

    def pick(self) -> list[Group]:
        """By default whatever is complete, the oldest version first."""
        return sorted(self.complete.values(), key=lambda group: (group.deadline, group.order))

    @property
    def admitted(self) -> int:
        """Groups that were started and not given up."""
        return self._committed + len(self._groups)

    @property
    def frontier(self) -> int:
        return self.version + (self.taken == self.batch_size)

    # Admission

    def room(self, version: int) -> int:
        return max(0, self.quota()) if version == self.version else 0

    def reserve(self, group: str, version: int) -> bool:
        if self.room(version) <= 0:
            return False
        self._order += 1
        self._groups[group] = self.in_flight[group] = Group(group, self._deadline(version, group), self._order)
        return True

    def lower(self, group: str, version: int) -> bool:
        self._groups[group].deadline = min(self._groups[group].deadline, self._deadline(version, group))
        return True

    def renew(self, group: str, version: int) -> None:
        self._groups[group].deadline = max(self._groups[group].deadline, self._deadline(version, group))

    def occupy(self, group: str) -> None:
        self._order += 1
        self.complete[group] = entry = self.in_flight.pop(group)
        entry.order, entry.state = self._order, "complete"

    def release(self, group: str, reason: str) -> None:
        self._find(group, "release", "in flight", "complete")
        self.in_flight.pop(group, None)
        self.complete.pop(group, None)
        del self._groups[group]
        self._released[reason] = self._released.get(reason, 0) + 1

    # Consumption

    def take(self, limit: int | None = None) -> list[str]:
        if self.taken == self.batch_size:
            return []
        most = self.batch_size - self.taken
        groups = self.pick()[: most if limit is None else min(limit, most)]
        for group in groups:
            group.state = "leased"
            self._leased.append(self.complete.pop(group.name))
        return [group.name for group in groups]

    def ready(self) -> bool:
        missing = self.batch_size - self.taken
        return 0 < missing <= len(self.complete) and missing <= len(self.pick())

    def consume(self, rank: Callable[[str], float] | None = None) -> Batch:  # noqa: ARG002  # nothing is given up
        step = self.version
        self.take()
        return Batch(step, [group.name for group in self._leased], [])

    def commit(self, step: int) -> None:  # noqa: ARG002  # there is only one that can be meant
        for group in self._leased:
            del self._groups[group.name]
        self._committed += self.taken
        self._leased = []
        self.version += 1

    def rollback(self, step: int) -> None:  # noqa: ARG002
        for group in self._leased:
            group.state = "complete"
        self.complete = {group.name: group for group in self._leased} | self.complete
        self._leased = []

    # For people

    def blocking(self) -> list[str]:
        """None by name: the open step takes whatever is complete."""
        return []

    def view(self) -> list[StepView]:
        return []

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted=self.admitted + sum(self._released.values()),
            live=len(self._groups),
            complete=len(self.complete),
            leased=self.taken,
            committed=self._committed,
            released=dict(self._released),
        )

    def to_state(self) -> dict[str, Any]:
        """The live groups, which is what invariants compare with the server's."""
        entries = self._groups.values()
        return {"groups": [[entry.name, entry.deadline - self.max_staleness, entry.state] for entry in entries]}
