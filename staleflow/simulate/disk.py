"""The journal under simulation: a disk that lags a little and may be full for a while.

A crash loses what it has not synced, or only a part of that: what was written last may be there although nobody knew.
"""

from collections.abc import Callable, Sequence

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
        self.released = 0
        """Events that were known to be durable, so that what rests on them was sent."""
        self.sink: Callable[[Event], None] | None = None
        """Gets every event that is durable, in order."""
        self._sunk = 0
        self._full_until = 0.0
        self._at_event: tuple[int, Callable[[], None]] | None = None
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
        elif self.sink is not None and not self.sync_s:
            self.sink(event)
        if self._at_event is not None and self.position >= self._at_event[0]:
            self._loop.at(self._loop.now, self._at_event[1])
            self._at_event = None

    def at_event(self, count: int, happens: Callable[[], None]) -> None:
        """Let something happen right after ``count`` more events."""
        self._at_event = self.position + count, happens

    def full(self, seconds: float) -> None:
        """Nothing can be written for a while; what is appended waits."""
        self._full_until = self._loop.now + seconds

    def crash(self, survives: float = 0.0) -> None:
        """Lose what is not durable, but for a share that ``survives``: up to any event. Ignore what the dead control
        plane still appends, until ``reopen``."""
        self.released = self.durable
        if self.sync_s:
            if self._loop.now >= self._full_until:
                self._durable += round(survives * (self.position - self._durable))
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
        if self._loop.now < self._full_until:
            self._loop.at(self._full_until, self._committed, crashes, position)
            return
        self._durable, self._committing = position, False
        if self.sink is not None:
            for event in self.events[self._sunk : position]:
                self.sink(event)
            self._sunk = position
        if self.position > position:
            self._commit()
        self.on_durable()
