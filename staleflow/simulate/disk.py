"""The journal under simulation: a disk that lags a little, and loses in a crash what it has not synced."""

from collections.abc import Sequence

from staleflow.servers.journal import Event, MemoryJournal
from staleflow.simulate.clock import VirtualLoop
from staleflow.types import Chunk

FAULT = "fault"


class SimJournal(MemoryJournal):
    def __init__(self, loop: VirtualLoop, keep: bool) -> None:
        super().__init__(keep)
        self._loop = loop
        self.sync_s = 0.0
        """Seconds of a commit; events that come meanwhile share the next one. At 0 everything is durable at once."""
        self._durable = 0
        self._committing = False
        self._crashes = 0
        self._crashed = False

    @property
    def durable(self) -> int:
        return self._durable if self.sync_s else self.position

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        if self._crashed:
            return
        super().append(event, kept, dropped)
        if self.sync_s and not self._committing:
            self._commit()

    def crash(self) -> None:
        """Lose what is not durable, and ignore what the dead control plane still appends, until ``reopen``."""
        if self.sync_s:
            lost, self.events = self.events[self._durable :], self.events[: self._durable]
            faults = [event for event in lost if event[0] == FAULT]  # those are not the control plane's to lose
            self.events += faults
            self.position = self._durable = len(self.events)
        self._crashes += 1
        self._committing, self._crashed = False, True

    def reopen(self) -> None:
        self._crashed = False

    def _commit(self) -> None:
        self._committing = True
        self._loop.at(self._loop.now + self.sync_s, self._committed, self._crashes, self.position)

    def _committed(self, crashes: int, position: int) -> None:
        if crashes != self._crashes:
            return
        self._durable, self._committing = position, False
        if self.position > position:
            self._commit()
        self.on_durable()
