"""The control block of a weights store: which slot is published, what each slot holds, and who is reading.

It is a small file that every process of the run maps. All numbers are aligned 8-byte words, each with one writer at a
time, so nothing here needs a lock that a killed process could keep::

    head    magic, format, token, published, closed
    slots   sequence, version, generation, size        for each slot
    leases  pid, start, slot + 1, expiry               for each reader

*Published* packs version and slot into one word: a version appears by one store. A slot's *sequence* is odd while it is
written; a reader that sees the same even number before and after its copy has copied one version. *Generation* names
the slot's segment: it grows before a segment is made, so that whoever comes after a crash knows what may exist.

Ordering: words before and after a copy must reach memory in the order of the program. x86 keeps stores in order and
loads in order by itself; elsewhere ``fence`` does: releasing a lock and taking it again orders what is before and
after.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from staleflow.servers.weights.segments import WeightsError, start_time

MAGIC = int.from_bytes(b"sfweight", "little")
FORMAT = 1
SLOTS = 8
LEASES = 256
HEAD_WORDS, SLOT_WORDS, LEASE_WORDS = 8, 4, 4
FIRST_LEASE = HEAD_WORDS + SLOTS * SLOT_WORDS
WORDS = FIRST_LEASE + LEASES * LEASE_WORDS
FORMAT_WORD, _TOKEN, _PUBLISHED, CLOSED_WORD = 1, 2, 3, 4
_SEQUENCE, _VERSION, _GENERATION, _SIZE = 0, 1, 2, 3
_PID, _START, _SLOT, _EXPIRY = 0, 1, 2, 3

ClockNs = Callable[[], int]
"""Nanoseconds on a clock that all processes of the machine share, as ``time.monotonic_ns`` does."""


class Published(NamedTuple):
    version: int
    slot: int


NOTHING = Published(-1, -1)


class ControlBlock:
    """The words of one store. Knows what they mean, not when to change them."""

    def __init__(self, words: memoryview, clock: ClockNs = time.monotonic_ns) -> None:
        self._words = words
        self._clock = clock
        self._lock = threading.Lock()
        self._lock.acquire()

    @staticmethod
    def blank() -> bytes:
        """A block with nothing published, for a new store."""
        words = [MAGIC, FORMAT, secrets.randbits(32), *([0] * (WORDS - 3))]
        return b"".join(word.to_bytes(8, "little") for word in words)

    def fence(self) -> None:
        """Whoever sees what is stored after this also sees what was stored before."""
        self._lock.release()
        self._lock.acquire()

    # What is published

    @property
    def published(self) -> Published:
        word = self._words[_PUBLISHED]
        return Published((word >> 8) - 1, word & 255) if word else NOTHING

    def publish(self, version: int, slot: int) -> None:
        self.fence()
        self._words[_PUBLISHED] = (version + 1) << 8 | slot

    @property
    def closed(self) -> bool:
        return bool(self._words[CLOSED_WORD])

    def close(self) -> None:
        self._words[CLOSED_WORD] = 1

    # Slots

    def sequence(self, slot: int) -> int:
        self.fence()
        return self._words[_at(slot) + _SEQUENCE]

    def version(self, slot: int) -> int:
        """The version that the slot holds; valid while its sequence is even."""
        return self._words[_at(slot) + _VERSION] - 1

    def generation(self, slot: int) -> int:
        return self._words[_at(slot) + _GENERATION]

    def size(self, slot: int) -> int:
        """Bytes of the slot's segment; zero if it has none."""
        return self._words[_at(slot) + _SIZE]

    def allocated(self) -> list[int]:
        return [slot for slot in range(SLOTS) if self.size(slot)]

    def segment(self, slot: int) -> str:
        """Name of the slot's segment; short, because macOS allows 31 characters."""
        return f"/sf-{self._words[_TOKEN]:08x}-{slot}-{self.generation(slot)}"

    def begin(self, slot: int) -> None:
        """Begin to write: from here on, its readers see that the slot is taken."""
        word = _at(slot) + _SEQUENCE
        self._words[word] = (self._words[word] + 1) | 1
        self.fence()

    def finish(self, slot: int, version: int) -> None:
        self._words[_at(slot) + _VERSION] = version + 1
        self.fence()
        self._words[_at(slot) + _SEQUENCE] += 1

    def next_generation(self, slot: int) -> str:
        """The name for a new segment of the slot, recorded before the segment exists."""
        self._words[_at(slot) + _GENERATION] += 1
        return self.segment(slot)

    def set_size(self, slot: int, size: int) -> None:
        self._words[_at(slot) + _SIZE] = size

    # Leases

    def claim(self) -> int:
        """An entry for a reader of this process. Call it with the registry locked."""
        for entry in range(LEASES):
            word = FIRST_LEASE + entry * LEASE_WORDS
            if not self._words[word + _PID] or not self._owned(word):
                self._words[word + _PID] = 0
                self._words[word + _SLOT] = self._words[word + _EXPIRY] = 0
                self._words[word + _START] = start_time(os.getpid()) or 0
                self._words[word + _PID] = os.getpid()
                return entry
        raise WeightsError(f"{LEASES} readers are attached already: close some, or share one reader per process")

    def lease(self, entry: int, slot: int, seconds: float) -> None:
        """Ask the writer to leave the slot alone for some seconds. Called again during a copy, to renew."""
        word = FIRST_LEASE + entry * LEASE_WORDS
        self._words[word + _EXPIRY] = self._clock() + int(seconds * 1e9)
        self._words[word + _SLOT] = slot + 1
        self.fence()

    def release(self, entry: int) -> None:
        self._words[FIRST_LEASE + entry * LEASE_WORDS + _SLOT] = 0

    def disclaim(self, entry: int) -> None:
        self._words[FIRST_LEASE + entry * LEASE_WORDS + _PID] = 0

    def leased(self) -> set[int]:
        """Slots under an unexpired lease of a living reader."""
        self.fence()
        found: set[int] = set()
        slots = self._words[FIRST_LEASE + _SLOT :: LEASE_WORDS].tolist()
        if not any(slots):
            return found
        for entry, slot in enumerate(slots):
            word = FIRST_LEASE + entry * LEASE_WORDS
            if slot and self._words[word + _EXPIRY] > self._clock() and self._owned(word):
                found.add(slot - 1)
        return found

    def _owned(self, word: int) -> bool:
        pid = self._words[word + _PID]
        return pid > 0 and start_time(pid) == self._words[word + _START]


def _at(slot: int) -> int:
    return HEAD_WORDS + slot * SLOT_WORDS


def segments_of(control: bytes) -> list[str] | None:
    """The segments that may exist for a control file; None if it is of another format."""
    if len(control) < WORDS * 8:
        return []  # its creator died before there was any segment
    words = memoryview(control).cast("q")
    if words[0] != MAGIC:
        return []
    if words[FORMAT_WORD] != FORMAT:
        return None
    block = ControlBlock(words)
    return [block.segment(slot) for slot in range(SLOTS) if block.generation(slot)]
