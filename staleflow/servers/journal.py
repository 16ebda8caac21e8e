"""Everything that changes the state of a run, in order.

An event is a plain tuple: its kind, then strings, numbers and tuples of them. State is changed only by applying events,
so a run is what its journal says, and replaying the journal after a crash gives the same state. ``durable.py`` has the
journal that survives one; the one here is the simulator's.
"""

import hashlib
import marshal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from staleflow.types import Chunk

Event = tuple[Any, ...]

NOTES = frozenset(("decision", "fault", "pull", "push", "restored"))
"""Kinds that say what happened to others than the trajectory server, and change nothing in it."""


class Journal(Protocol):
    on_durable: Callable[[], None]
    """Called whenever ``durable`` has grown; maybe from another thread."""

    @property
    def position(self) -> int:
        """How many events it has been given, in this life and before."""
        ...

    @property
    def durable(self) -> int:
        """How many of them survive a crash. The world may be told of an event once it is among them."""
        ...

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        """Add the event, with the piece of payload that came with it, and the names whose payload it made needless.

        The three become durable together, and in the order of the calls."""
        ...

    def hurry(self) -> None:
        """Somebody waits for what has been appended to become durable."""
        ...

    def may_snapshot(self, state: Callable[[], dict[str, Any]]) -> None:
        """A good moment for a snapshot: asks for the ``state`` after everything that was appended if it wants one."""
        ...


class MemoryJournal:
    """Keeps the events (unless told not to) and a rolling hash over all of them. Everything is durable at once."""

    FLUSH = 512

    def __init__(self, keep: bool = True) -> None:
        self.events: list[Event] = []
        self.position = 0
        self.keep = keep
        self.on_durable: Callable[[], None] = lambda: None
        self._pending: list[Event] = []
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def durable(self) -> int:
        return self.position

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:  # noqa: ARG002  # payload is not what a run is compared by
        self.position += 1
        if self.keep:
            self.events.append(event)
        self._pending.append(event)
        if len(self._pending) >= self.FLUSH:
            self._flush()

    def hurry(self) -> None:
        """It is durable already."""

    def may_snapshot(self, state: Callable[[], dict[str, Any]]) -> None:
        """None is needed: what is in memory is replayed from its beginning."""

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
