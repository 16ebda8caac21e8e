"""Everything that changes the state of a run, in order.

An event is a plain tuple: its kind, then strings, numbers and tuples of them. State is changed only by applying events,
so a run is what its journal says, and replaying the journal after a crash gives the same state.
"""

import hashlib
import marshal
from typing import Any, Protocol

Event = tuple[Any, ...]


class Journal(Protocol):
    def append(self, event: Event) -> None:
        """Add the event. When this returns, it will survive what the journal promises to survive."""
        ...


class MemoryJournal:
    """Keeps the events (unless told not to) and a rolling hash over all of them."""

    FLUSH = 512

    def __init__(self, keep: bool = True) -> None:
        self.events: list[Event] = []
        self.count = 0
        self.keep = keep
        self._pending: list[Event] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def append(self, event: Event) -> None:
        self.count += 1
        if self.keep:
            self.events.append(event)
        self._pending.append(event)
        if len(self._pending) >= self.FLUSH:
            self._flush()

    def digest(self) -> str:
        """The hash of every event so far: equal runs have equal digests."""
        rest = self._hash.copy()
        rest.update(encode(self._pending))
        return rest.hexdigest()

    def _flush(self) -> None:
        self._hash.update(encode(self._pending))
        self._pending.clear()


def encode(events: list[Event]) -> bytes:
    """Equal events as equal bytes: version 2 of the format does that, later ones mark shared objects."""
    return marshal.dumps(events, 2)
