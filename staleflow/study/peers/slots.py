"""The paper's protocol taken literally, as its authors ship it (PSRL): a buffer of slots for each step.

*Reserve* puts a group into the latest buffer that its version permits and that has an empty slot. *Occupy* empties that
slot and takes the earliest empty one it may. With ``exchange``, a reservation in an earlier buffer that may be later
moves into the emptied slot first, and leaves an earlier one to the group that has finished. A step is ready when every
slot of its buffer is occupied. The bound is kept: no group is ever in a buffer that its version does not permit.
"""

from collections import Counter

from staleflow.protocol.schedule import LiveGroup
from staleflow.study.peers.ledger import PeerLedger


class SlotLedger(PeerLedger):
    exchange = True

    def __init__(self, batch_size: int, max_staleness: int, redundancy: int = 0) -> None:
        super().__init__(batch_size, max_staleness, redundancy)
        self.buffer: dict[str, int] = {}
        self._used: Counter[int] = Counter()

    def _empty(self, first: int, last: int) -> list[int]:
        """Buffers with an empty slot, earliest first."""
        return [at for at in range(max(first, self.frontier), last + 1) if self._used[at] < self.batch_size]

    def room(self, version: int) -> int:
        buffers = self._empty(version, version + self.max_staleness)
        return sum(self.batch_size - self._used[at] for at in buffers)

    def pick(self) -> list[LiveGroup]:
        return [group for group in self.complete.values() if self.buffer[group.name] == self.frontier]

    def blocking(self) -> list[str]:
        full = self._used[self.frontier] == self.batch_size
        return [name for name in self.in_flight if self.buffer[name] == self.frontier] if full else []

    def reserve(self, group: str, version: int) -> bool:
        buffers = self._empty(version, version + self.max_staleness)
        if granted := super().reserve(group, version):
            self._put(group, buffers[-1])
        return granted

    def lower(self, group: str, version: int) -> bool:
        return version + self.max_staleness >= self.buffer[group] and super().lower(group, version)

    def occupy(self, group: str) -> None:
        super().occupy(group)
        entry, slot = self.complete[group], self.buffer[group]
        self._used[slot] -= 1
        first = entry.deadline - self.max_staleness
        if self.exchange and (other := self._movable(max(first, self.frontier), slot)):
            self._used[self.buffer[other]] -= 1
            self._put(other, slot)
        self._put(group, self._empty(first, entry.deadline)[0])

    def _movable(self, first: int, slot: int) -> str | None:
        """A reservation in the earliest buffer from ``first`` on that may be as late as ``slot``."""
        found = [
            (self.buffer[name], name)
            for name, group in self.in_flight.items()
            if first <= self.buffer[name] < slot <= group.deadline
        ]
        return min(found)[1] if found else None

    def release(self, group: str, reason: str) -> None:
        super().release(group, reason)
        self._used[self.buffer.pop(group)] -= 1

    def commit(self, step: int) -> None:
        for group in self.leased:
            del self.buffer[group.name]
        del self._used[step]
        super().commit(step)

    def _put(self, group: str, at: int) -> None:
        self.buffer[group] = at
        self._used[at] += 1


class LiteralSlotLedger(SlotLedger):
    """Without exchange: a slot once reserved stays where it is until its group has finished."""

    exchange = False
