"""Everything that changes the state of a run, in order.

An event is a plain tuple: its kind, then strings, numbers and tuples of them. State changes only by applying events, so
replaying the journal after a crash gives the same state. ``durable.py`` has the journal that survives a crash; the one
here is the simulator's.
"""

import hashlib
import marshal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from staleflow.types import Chunk

Event = tuple[Any, ...]

TIME = "time"
"""``("time", seconds)``: of training, when the events after it happened."""
STAMP_S = 0.05
"""Events no further apart than this may share a time."""
NOTES = frozenset(
    [
        "counted",
        "decision",
        "evaluated",
        "evaluating",
        "fault",
        "join",
        "left",
        "lost",
        "pull",
        "push",
        "record",
        "restored",
        "scale",
        "time",
        "trained",
    ]
)
"""Kinds of events that do not change the trajectory server."""


class Journal(Protocol):
    on_durable: Callable[[], None]
    """Called whenever ``durable`` has grown; maybe from another thread."""

    @property
    def position(self) -> int:
        """How many events have been appended, those of earlier attempts included."""
        ...

    @property
    def durable(self) -> int:
        """How many of them would survive a crash. Only these may be acted on outside."""
        ...

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        """Add the event, with the payload that came with it and the names whose payload is no longer needed.

        The three become durable together, and in the order of the calls."""
        ...

    def hurry(self) -> None:
        """Make what has been appended durable soon, because somebody waits for it."""
        ...

    def may_snapshot(self, state: Callable[[], dict[str, Any]]) -> None:
        """A good moment for a snapshot: calls ``state``, the one after everything that was appended, if one is due."""
        ...


class MemoryJournal:
    """Keeps the events (with ``keep``) and a rolling hash over all of them. Everything counts as durable at once."""

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
        """Everything is durable already."""

    def may_snapshot(self, state: Callable[[], dict[str, Any]]) -> None:
        """Never needed: events in memory are replayed from the beginning."""

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
