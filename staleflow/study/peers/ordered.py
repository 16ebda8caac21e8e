"""Policies that train in the order of admission: the window that waits, and the one-step-off pipeline.

Every group gets the next free place in the order; step ``k`` trains places ``k * B`` to ``(k + 1) * B - 1``. A group
that is given up leaves its place to the next one that starts.

*Window and wait* (verl V1 ``wait``, tinker-cookbook's pacing): places up to step ``version + max_staleness`` may start,
and a step waits for all of its own. So it keeps the bound. (To wait only for groups that are about to be too old, and
otherwise take whatever is complete, does not: more than ``B`` of them may be due at the next step.)

*One step off* (verl's pipeline): batch ``k`` starts as a whole when batch ``k - 1`` is complete and version ``k - 1``
is there, and is generated while that one is trained. Staleness is 1, whatever bound is asked for.
"""

from heapq import heappop, heappush

from staleflow.protocol.schedule import LiveGroup
from staleflow.study.peers.ledger import PeerLedger


class WindowLedger(PeerLedger):
    def __init__(self, batch_size: int, max_staleness: int, redundancy: int = 0) -> None:
        super().__init__(batch_size, max_staleness, redundancy)
        self.places: dict[str, int] = {}
        self._free: list[int] = []

    def pick(self) -> list[LiveGroup]:
        return [group for group in self.complete.values() if self._step(group.name) == self.frontier]

    def blocking(self) -> list[str]:
        """Groups of the open step in flight, once all of its groups are reserved."""
        whole = sum(self._step(name) == self.frontier for name in self.places) == self.batch_size
        return [name for name in self.in_flight if self._step(name) == self.frontier] if whole else []

    def _step(self, group: str) -> int:
        return self.places[group] // self.batch_size

    def reserve(self, group: str, version: int) -> bool:
        if granted := super().reserve(group, version):
            self.places[group] = heappop(self._free) if self._free else self.admitted - 1
        return granted

    def release(self, group: str, reason: str) -> None:
        super().release(group, reason)
        heappush(self._free, self.places.pop(group))

    def commit(self, step: int) -> None:
        for group in self.leased:
            del self.places[group.name]
        super().commit(step)


class OneStepLedger(WindowLedger):
    def quota(self) -> int:
        """The groups still to start in the batch whose turn it is."""
        batch = self.admitted // self.batch_size
        earlier = any(self._step(name) < batch for name in self.in_flight)
        return 0 if earlier or batch > self.version + 1 else (batch + 1) * self.batch_size - self.admitted
