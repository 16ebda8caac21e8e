"""The journal that survives a crash: SQLite in write-ahead mode, synced on every commit.

Events go to a queue; a writer thread takes all that has gathered, writes it as one transaction and syncs it (group
commit). So an event costs its caller a list append, and many share one sync. ``durable`` counts the events on disk;
a message about an event waits until it is among them (``runtime/outbox.py``)::

    journal = DurableJournal(run / "journal.db")
    server = TrajectoryServer(ledger, 16, 0, journal, payloads)
    recover(server, journal)          # servers/state.py
    server.admit(prompts)             # appends; the writer thread commits

One database, four tables. ``log`` has the events in batches with a checksum each; ``snapshot`` the latest state, so
that a recovery replays only what came after it; ``meta`` the format and the settings of the run; ``payload`` the places
in ``payload_files.py``'s files where the tokens of live trajectories are, synced before the transaction commits. Events
stay in the log as a record of the run; their payload does not.

Only the owner writes: a lock file, which the kernel releases when its holder dies, keeps a second one out. Anyone may
read while a run is in progress.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from staleflow.servers.database import (
    DamagedError,
    JournalError,
    fix_for,
    open_database,
    readable,
    take_lock,
    torn_bytes,
)
from staleflow.servers.journal import STAMP_S, TIME, Event
from staleflow.servers.payload_files import FileRange, Named, PayloadFiles
from staleflow.types import Chunk

SNAPSHOT_EVENTS = 200_000
"""Replaying this many takes about a second."""
TRANSACTION_BYTES = 8 << 20
"""Payload in one transaction, about; it limits how long an event waits behind others for its sync."""
RETRY_S = 1.0
"""Pause before a failed write is tried again."""


_Append = tuple[Event, Named | None, Sequence[str]]
"""An event, the payload that came with it, and the names whose payload is no longer needed."""


class _Snapshot:
    def __init__(self, body: bytes) -> None:
        self.body = body


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class DurableJournal:
    def __init__(
        self,
        path: str | Path,
        *,
        threaded: bool = True,
        snapshot_events: int = SNAPSHOT_EVENTS,
        lazy_s: float | None = None,
    ) -> None:
        """Open or create the journal at ``path``. ``threaded=False``: nothing is written before ``commit``.

        ``lazy_s``: how long events may gather before they are written; ``hurry`` writes them at once.
        """
        self.path = Path(path)
        self.notes: list[str] = []
        """Damage that was found and repaired when it was opened."""
        self.on_durable: Callable[[], None] = lambda: None
        self.trouble: str | None = None
        """Why nothing can be written at the moment; None if it can. What was appended waits and is not lost."""
        self._snapshot_events = snapshot_events
        self._lazy_s = lazy_s
        self._stamp_at = float("inf")
        """By the monotonic clock: events from then on get another time."""
        self._epoch = 0.0
        self._lock_file = take_lock(self.path)
        try:
            if torn := torn_bytes(self.path):
                self.notes.append(f"{self.path}: dropped {torn} bytes of a write that a crash left unfinished")
            self._db = open_database(self.path)
            with readable(self.path):
                self.durable = self.position = int(self._last())
                self._snapshot_at = int(self._latest_snapshot())
                rows = self._db.execute("SELECT * FROM payload")
                self._places = {int(row): FileRange(*map(int, where)) for row, *where in rows}
                """Where the chunks of each transaction are, by row of the table."""
            self._files = PayloadFiles(self.path.with_name(self.path.name + "-payload"), self._places.values())
        except BaseException:
            os.close(self._lock_file)
            raise
        self._rows: dict[str, list[int]] = {}
        """The rows that hold a trajectory's payload, by name; one entry for each chunk."""
        self._live: dict[int, int] = {}
        """How many chunks of each row are needed."""
        self._next_row = 1 + max(self._places, default=0)
        self._queue: list[_Append | _Snapshot] = []
        self._writing: list[_Append | _Snapshot] = []
        """Taken from the queue and not yet known to be on disk."""
        self._write_lock = threading.Lock()
        self._grown = threading.Condition()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._keep_writing, name="journal", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # Writing

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        if self._closed:
            raise JournalError(f"the journal {self.path} is closed: {event[0]} cannot be written any more")
        if (now := time.monotonic()) >= self._stamp_at:
            self.stamp(now - self._epoch)
            self._stamp_at = now + STAMP_S
        self.position += 1
        self._queue.append((event, kept, dropped))
        if self._lazy_s is None:
            self.hurry()

    def stamp(self, seconds: float) -> None:
        """What is appended from now on happened at this time."""
        self.position += 1
        self._queue.append(((TIME, round(float(seconds), 3)), None, ()))

    def stamp_from(self, seconds: float) -> None:
        """It is this time now: from now on events are stamped by the clock."""
        self._epoch = time.monotonic() - seconds
        self._stamp_at = 0.0

    def hurry(self) -> None:
        """Write what has been appended now: somebody waits for it."""
        if self._thread is not None and not self._wake.is_set():
            self._wake.set()

    def may_snapshot(self, state: Callable[[], dict[str, Any]]) -> None:
        if self.position - self._snapshot_at >= self._snapshot_events:
            self.snapshot(state())

    def snapshot(self, state: dict[str, Any]) -> None:
        """Let recovery start from this state, the one after everything that was appended."""
        self._snapshot_at = self.position
        self._queue.append(_Snapshot(_encode(state)))
        self._wake.set()

    def commit(self) -> None:
        """Write and sync everything that was appended. On an error all of it is kept for the next try."""
        while self._queue or self._writing:
            self._commit_some()

    def wait(self, position: int, timeout_s: float) -> None:
        """Wait until the first ``position`` events are durable; ``JournalError`` says what prevents it."""
        with self._grown:
            if not self._grown.wait_for(lambda: self.durable >= position, timeout_s):
                raise JournalError(
                    f"event {position} is not durable after {timeout_s:g} s, only {self.durable} are: "
                    + (self.trouble or "the disk is slow, check it")
                )

    def _commit_some(self) -> None:
        with self._write_lock:
            if not self._writing:
                taken = _one_transaction(self._queue)
                self._writing += self._queue[:taken]
                del self._queue[:taken]  # never a new list: another thread may be appending to this one
            if not self._writing:
                return
            try:
                self._write(self._writing)
            except (sqlite3.Error, OSError) as error:
                self.trouble = f"cannot write {self.path} ({error}): {fix_for(error)}; nothing is lost meanwhile"
                raise JournalError(self.trouble) from error
            self.trouble = None
            with self._grown:
                self.durable += sum(not isinstance(each, _Snapshot) for each in self._writing)
                self._grown.notify_all()
            self._writing = []
        self.on_durable()

    def close(self) -> None:
        """Write what is left and close the files."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.commit()
        finally:
            self._files.close()
            self._db.close()
            os.close(self._lock_file)

    def _keep_writing(self) -> None:
        while not self._closed:
            self._wake.wait(self._lazy_s)
            self._wake.clear()
            while not self._closed and (self._queue or self._writing):
                try:
                    self._commit_some()
                except JournalError:
                    self._wake.wait(RETRY_S)
                    self._wake.clear()

    def _write(self, batch: list[_Append | _Snapshot]) -> None:
        appends = [each for each in batch if not isinstance(each, _Snapshot)]
        chunks = [kept for _, kept, _ in appends if kept is not None]
        dropped = [name for _, _, names in appends for name in names]
        rows, live = self._after(chunks, dropped)
        place = self._files.write(chunks) if live.get(self._next_row) else None
        needless = [row for row, count in live.items() if not count]
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            events: list[Event] = []
            position = self.durable
            for each in batch:
                if not isinstance(each, _Snapshot):
                    events.append(each[0])
                    continue
                position = self._insert_events(position, events)
                events = []
                db.execute("DELETE FROM snapshot")
                db.execute("INSERT INTO snapshot VALUES(?,?,?)", (position, zlib.crc32(each.body), each.body))
            self._insert_events(position, events)
            if place is not None:
                db.execute("INSERT INTO payload VALUES(?,?,?,?,?)", (self._next_row, *place))
            db.executemany("DELETE FROM payload WHERE id=?", [(row,) for row in needless])
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        if place is not None:
            self._places[self._next_row] = place
            self._files.keep(place)
            self._next_row += 1
        self._rows.update(rows)
        for name in dropped:
            self._rows.pop(name, None)
        self._live.update(live)
        self._forget(needless)

    def _after(self, chunks: Sequence[Named], dropped: Sequence[str]) -> tuple[dict[str, list[int]], dict[int, int]]:
        """The entries of ``_rows`` and ``_live`` that change when these are written."""
        rows: dict[str, list[int]] = {}
        live: dict[int, int] = {}
        for name, _ in chunks:
            rows[name] = [*rows.get(name, self._rows.get(name, ())), self._next_row]
            live[self._next_row] = live.get(self._next_row, 0) + 1
        for name in dropped:
            for row in rows.pop(name, self._rows.get(name, ())):
                live[row] = live.get(row, self._live.get(row, 0)) - 1
        return rows, live

    def _forget(self, rows: Iterable[int]) -> None:
        """Drop rows that are no longer needed or in the database, and the files that only they used."""
        files = {self._places.pop(row).file for row in rows if row in self._places}
        for row in rows:
            self._live.pop(row, None)
        for file in files - {place.file for place in self._places.values()}:
            self._files.remove(file)

    def _insert_events(self, position: int, events: list[Event]) -> int:
        if events:
            body = _encode(events)
            position += len(events)
            self._db.execute("INSERT INTO log VALUES(?,?,?,?)", (position, len(events), zlib.crc32(body), body))
        return position

    # Reading back

    def belongs_to(self, settings: dict[str, int]) -> None:
        """Store the settings of a new run; ``JournalError`` if the run was started with others."""
        with readable(self.path):
            found = self._db.execute("SELECT value FROM meta WHERE key='settings'").fetchone()
            before = None if found is None else dict(json.loads(found[0]))
        if before is None:
            self._db.execute("INSERT INTO meta VALUES('settings', ?)", (json.dumps(settings),))
            return
        for key, old in before.items():
            if settings.get(key) != old:
                raise JournalError(
                    f"the run in {self.path} was started with {key}={old}, not {settings.get(key)}: "
                    "resume it with the same settings, or use another run directory"
                )

    def begin(self, first: int = 1) -> int:
        """Counts the attempts at a run that write to this journal. The number of this one, at least ``first``."""
        with readable(self.path):
            found = self._db.execute("SELECT value FROM meta WHERE key='attempt'").fetchone()
            attempt = max(first, 1 + int(found[0])) if found else first
        try:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES('attempt', ?)", (attempt,))
        except sqlite3.Error as error:
            raise JournalError(f"cannot write {self.path} ({error}): {fix_for(error)}") from error
        return attempt

    def recovered(self) -> tuple[dict[str, Any] | None, Iterator[Event]]:
        """The latest snapshot, if there is one, and every event after it."""
        with readable(self.path):
            found = self._db.execute("SELECT position, crc, body FROM snapshot").fetchone()
            damaged = found is not None and zlib.crc32(found[2]) != found[1]
        if found is None:
            return None, self.events()
        position, _, body = found
        if damaged:
            self.notes.append(f"{self.path}: the snapshot is damaged; every event is replayed instead")
            return None, self.events()
        return cast(dict[str, Any], _decode(body)), self.events(after=position)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Every event on disk after the first ``after``."""
        expected = after
        with readable(self.path):
            rows = self._db.execute("SELECT * FROM log WHERE last > ? ORDER BY last", (after,))
        while True:
            with readable(self.path):
                if (row := next(rows, None)) is None:
                    return
                last, count, crc, body = row
                whole = zlib.crc32(body) == crc and last - count == expected
                events = cast(list[Any], _decode(body)) if whole else []
            if not whole:
                raise DamagedError(
                    f"{self.path} is damaged: events {expected + 1} to {last} cannot be read, those before are whole. "
                    "Restore the file from a copy, or start a new run from the latest checkpoint"
                )
            expected = last
            for event in events:
                yield frozen(event)

    def payloads(self, live: Container[str], kept: Container[str] = ()) -> Iterator[Named]:
        """Every chunk of payload of the ``live`` names on disk, in the order it came. Deletes all others but those of
        the ``kept`` names."""
        self._rows, self._live = {}, dict.fromkeys(self._places, 0)
        for row in sorted(self._places):
            for name, chunk in self._read(row):
                alive = name in live
                if alive or name in kept:
                    self._rows.setdefault(name, []).append(row)
                    self._live[row] += 1
                if alive:
                    yield name, chunk
        needless = [row for row in self._places if not self._live[row]]
        self._db.executemany("DELETE FROM payload WHERE id=?", [(row,) for row in needless])
        self._forget(needless)

    def __contains__(self, name: str) -> bool:
        """Whether any payload of this name is on disk."""
        return name in self._rows

    def chunks(self, names: Collection[str]) -> Iterator[Named]:
        """The chunks of payload of these names on disk, in the order they came."""
        with self._write_lock:
            rows = sorted({row for name in names for row in self._rows.get(name, ())})
        for row in rows:
            yield from ((name, chunk) for name, chunk in self._read(row) if name in names)

    def _read(self, row: int) -> list[Named]:
        place = self._places[row]
        with readable(self.path):
            chunks = self._files.read(place)
        if chunks is None:
            raise DamagedError(
                f"{self.path}-payload is damaged: {place.size} bytes at {place.offset} of file {place.file} cannot "
                "be read. Restore it from a copy, or start a new run from the latest checkpoint"
            )
        return chunks

    def _last(self) -> int:
        return self._db.execute("SELECT max(last) FROM log").fetchone()[0] or 0

    def _latest_snapshot(self) -> int:
        return self._db.execute("SELECT max(position) FROM snapshot").fetchone()[0] or 0


def _one_transaction(queue: list[_Append | _Snapshot]) -> int:
    """How many from the front of the queue to write at once: many share a sync, but no event waits too long."""
    size = 0
    for count, each in enumerate(queue, 1):
        if not isinstance(each, _Snapshot) and each[1] is not None:
            _, chunk = each[1]
            size += len(chunk.tokens) + len(chunk.logprobs)
            if size >= TRANSACTION_BYTES:
                return count
    return len(queue)


def frozen(value: Any) -> Any:
    """The decoder's lists as the tuples they were."""
    if type(value) is not list:
        return value
    return tuple([frozen(each) if type(each) is list else each for each in cast("list[Any]", value)])
