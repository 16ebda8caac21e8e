"""The journal that survives a crash: SQLite in write-ahead mode, synced on every commit.

Events go to a queue; a writer thread takes all that has gathered, writes it as one transaction and syncs it (group
commit). So an event costs its caller a list append, and many share one sync. ``durable`` tells how far the disk is;
whoever wants to tell the world of an event waits for that (``runtime/outbox.py``)::

    journal = DurableJournal(run / "journal.db")
    server = TrajectoryServer(ledger, 16, 0, journal, payloads)
    recover(server, journal)          # servers/state.py
    server.admit(prompts)             # appends; the writer thread commits

One file, four tables. ``log`` has the events in batches with a checksum each; ``snapshot`` the latest state, so that a
recovery replays only what came after it; ``payload`` the tokens of trajectories that are not consumed yet, deleted as
they are; ``meta`` the format and the settings of the run. Events stay in the log for those who ask what happened; their
payload does not.

Only the owner writes: a lock file, which the kernel lets go of when its holder dies, keeps a second one out. Anyone may
read while a run is going on.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from staleflow.servers.journal import Event
from staleflow.servers.payloads import Chunk

FORMAT = 1
PAGE = 16_384
"""Bytes. Small enough for a commit of a few events, large enough for chunks of a thousand tokens."""
SNAPSHOT_EVENTS = 200_000
"""Replaying so many takes about a second."""
RETRY_S = 1.0
"""A disk that was full is tried again this often."""

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE log(last INTEGER PRIMARY KEY, count INTEGER, crc INTEGER, body BLOB);
CREATE TABLE snapshot(position INTEGER PRIMARY KEY, crc INTEGER, body BLOB);
CREATE TABLE payload(id INTEGER PRIMARY KEY, name TEXT, start INTEGER, crc INTEGER, tokens BLOB, logprobs BLOB);
"""


class JournalError(RuntimeError):
    """The journal cannot be opened, read or written; the message says what to do."""


class _Append(NamedTuple):
    event: Event
    kept: tuple[str, Chunk] | None
    dropped: Sequence[str]


class _Snapshot(NamedTuple):
    body: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class DurableJournal:
    def __init__(self, path: str | Path, *, threaded: bool = True, snapshot_events: int = SNAPSHOT_EVENTS) -> None:
        """Open, or make, the journal at ``path``. ``threaded=False``: nothing is written before ``commit``."""
        self.path = Path(path)
        self.notes: list[str] = []
        """What was found wrong when it was opened, and put right."""
        self.on_durable: Callable[[], None] = lambda: None
        self.trouble: str | None = None
        """Why nothing can be written at the moment, if nothing can. What was appended waits and is not lost."""
        self._snapshot_events = snapshot_events
        self._lock_file = _lock(self.path)
        try:
            if torn := torn_bytes(self.path):
                self.notes.append(f"{self.path}: dropped {torn} bytes of a write that a crash left unfinished")
            self._db = _open(self.path)
            self.durable = self._last()
            self._rows = self._payload_rows()
        except BaseException:
            os.close(self._lock_file)
            raise
        self.position = self.durable
        self._snapshot_at = self._latest_snapshot()
        self._next_row = 1 + max((row for rows in self._rows.values() for row in rows), default=0)
        self._queue: list[_Append | _Snapshot] = []
        self._writing: list[_Append | _Snapshot] = []
        """Taken from the queue, and not known to be on disk."""
        self._write_lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._write_for_ever, name="journal", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # Writing

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        if self._closed:
            raise JournalError(f"the journal {self.path} is closed: {event[0]} cannot be written any more")
        self.position += 1
        self._queue.append(_Append(event, kept, dropped))
        if self._thread is not None and not self._wake.is_set():
            self._wake.set()

    def may_snapshot(self, state: Callable[[], dict[str, Any]]) -> None:
        if self.position - self._snapshot_at >= self._snapshot_events:
            self.snapshot(state())

    def snapshot(self, state: dict[str, Any]) -> None:
        """Recovery may start from this state, which is the one after everything that was appended."""
        self._snapshot_at = self.position
        self._queue.append(_Snapshot(_encode(state)))
        self._wake.set()

    def commit(self) -> None:
        """Write and sync everything that was appended. On an error all of it is kept for the next try."""
        with self._write_lock:
            taken = len(self._queue)
            self._writing += self._queue[:taken]
            del self._queue[:taken]  # never a new list: another thread may be appending to this one
            if not self._writing:
                return
            try:
                self._write(self._writing)
            except (sqlite3.Error, OSError) as error:
                self.trouble = f"cannot write {self.path} ({error}): {_fix_for(error)}; nothing is lost meanwhile"
                raise JournalError(self.trouble) from error
            self.trouble = None
            self.durable += sum(isinstance(each, _Append) for each in self._writing)
            self._writing = []
        self.on_durable()

    def close(self) -> None:
        """Write what is left and let go of the files."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.commit()
        finally:
            self._db.close()
            os.close(self._lock_file)

    def _write_for_ever(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while not self._closed and (self._queue or self._writing):
                try:
                    self.commit()
                except JournalError:
                    self._wake.wait(RETRY_S)
                    self._wake.clear()

    def _write(self, batch: list[_Append | _Snapshot]) -> None:
        rows = dict[str, list[int]]()
        kept: list[tuple[Any, ...]] = []
        gone: list[tuple[int]] = []
        row = self._next_row
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            events: list[Event] = []
            position = self.durable
            for each in batch:
                if isinstance(each, _Snapshot):
                    position = self._insert_events(position, events)
                    events = []
                    db.execute("DELETE FROM snapshot")
                    db.execute("INSERT INTO snapshot VALUES(?,?,?)", (position, zlib.crc32(each.body), each.body))
                    continue
                events.append(each.event)
                if each.kept is not None:
                    name, chunk = each.kept
                    crc = zlib.crc32(chunk.logprobs, zlib.crc32(chunk.tokens))
                    kept.append((row, name, chunk.start, crc, chunk.tokens, chunk.logprobs))
                    rows.setdefault(name, []).append(row)
                    row += 1
                for name in each.dropped:
                    gone += [(old,) for old in (*self._rows.get(name, ()), *rows.get(name, ()))]
            self._insert_events(position, events)
            if kept:
                db.executemany("INSERT INTO payload VALUES(?,?,?,?,?,?)", kept)
            if gone:
                db.executemany("DELETE FROM payload WHERE id=?", gone)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        self._next_row = row
        for name, added in rows.items():
            self._rows.setdefault(name, []).extend(added)
        for each in batch:
            if isinstance(each, _Append):
                for name in each.dropped:
                    self._rows.pop(name, None)

    def _insert_events(self, position: int, events: list[Event]) -> int:
        if events:
            body = _encode(events)
            position += len(events)
            self._db.execute("INSERT INTO log VALUES(?,?,?,?)", (position, len(events), zlib.crc32(body), body))
        return position

    # Reading back

    def belongs_to(self, settings: dict[str, int]) -> None:
        """Remember what the run was started with, or refuse to go on with something else."""
        found = self._db.execute("SELECT value FROM meta WHERE key='settings'").fetchone()
        if found is None:
            self._db.execute("INSERT INTO meta VALUES('settings', ?)", (json.dumps(settings),))
            return
        for key, old in json.loads(found[0]).items():
            if settings.get(key) != old:
                raise JournalError(
                    f"the run in {self.path} was started with {key}={old}, not {settings.get(key)}: "
                    "resume it with the same settings, or use another run directory"
                )

    def recovered(self) -> tuple[dict[str, Any] | None, Iterator[Event]]:
        """The latest snapshot, if there is one, and every event after it."""
        found = self._db.execute("SELECT position, crc, body FROM snapshot").fetchone()
        if found is None:
            return None, self.events()
        position, crc, body = found
        if zlib.crc32(body) != crc:
            self.notes.append(f"{self.path}: the snapshot is damaged; every event is replayed instead")
            return None, self.events()
        return cast(dict[str, Any], _decode(body)), self.events(after=position)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Every event that is on disk, from the one behind ``after`` on."""
        expected = after
        for last, count, crc, body in self._db.execute("SELECT * FROM log WHERE last > ? ORDER BY last", (after,)):
            if zlib.crc32(body) != crc or last - count != expected:
                raise JournalError(
                    f"{self.path} is damaged: events {expected + 1} to {last} cannot be read, those before are whole. "
                    "Restore the file from a copy, or start a new run from the latest checkpoint"
                )
            expected = last
            for event in cast(list[Any], _decode(body)):
                yield frozen(event)

    def payloads(self) -> Iterator[tuple[str, Chunk]]:
        """Every piece of payload that is on disk, in the order it came."""
        query = "SELECT name, start, crc, tokens, logprobs FROM payload ORDER BY id"
        for name, start, crc, tokens, logprobs in self._db.execute(query):
            if zlib.crc32(logprobs, zlib.crc32(tokens)) != crc:
                raise JournalError(
                    f"{self.path} is damaged: tokens of trajectory {name} from {start} on cannot be read. "
                    "Restore the file from a copy, or start a new run from the latest checkpoint"
                )
            yield name, Chunk(start, tokens, logprobs)

    def _last(self) -> int:
        return self._db.execute("SELECT max(last) FROM log").fetchone()[0] or 0

    def _latest_snapshot(self) -> int:
        return self._db.execute("SELECT max(position) FROM snapshot").fetchone()[0] or 0

    def _payload_rows(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, name in self._db.execute("SELECT id, name FROM payload ORDER BY id"):
            rows.setdefault(name, []).append(row)
        return rows


def frozen(value: Any) -> Any:
    """Lists, as the decoder makes them, as the tuples they were."""
    return tuple(map(frozen, cast(list[Any], value))) if type(value) is list else value


def torn_bytes(path: Path) -> int:
    """How many bytes at the end of the write-ahead file belong to a transaction that was never finished.

    SQLite leaves them out by itself; this is to be able to say so. A frame is 24 bytes and a page; the second word of
    one that ends a transaction is not zero; frames of the present round carry the salt of the file's header."""
    try:
        wal = path.with_name(path.name + "-wal").open("rb")
    except FileNotFoundError:
        return 0
    with wal:
        header = wal.read(32)
        size = os.fstat(wal.fileno()).st_size
        if len(header) < 32:
            return size
        frame, salt = 24 + struct.unpack(">I", header[8:12])[0], header[16:24]
        whole = 32
        for at in range(32, size, frame):
            wal.seek(at)
            begin = wal.read(24)
            if len(begin) == 24 and begin[8:16] != salt:
                return at - whole  # the rest is left over from an earlier round
            if at + frame <= size and begin[4:8] != bytes(4):
                whole = at + frame
        return size - whole


def _lock(path: Path) -> int:
    """Hold the lock file beside the journal, or say who does."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise JournalError(
            f"cannot write in {path.parent} ({error.strerror}): choose a directory that you may write to"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(handle, 32, 0).decode() or "unknown"
        os.close(handle)
        raise JournalError(
            f"the journal {path} belongs to process {owner}, which is running: stop it, or use another run directory"
        ) from error
    os.truncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def _open(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute(f"PRAGMA page_size={PAGE}")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            db.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES('format', {FORMAT}); COMMIT;")
        found = db.execute("SELECT value FROM meta WHERE key='format'").fetchone()
    except sqlite3.Error as error:
        raise JournalError(f"cannot open the journal {path} ({error}): {_fix_for(error)}") from error
    if found is None or found[0] != FORMAT:
        db.close()
        written = "another program" if found is None else f"format {found[0]}"
        raise JournalError(
            f"the journal {path} was written by {written}, this version of StaleFlow reads format {FORMAT}: "
            "update StaleFlow, or use another run directory"
        )
    return db


def _fix_for(error: Exception) -> str:
    text = str(error)
    if "full" in text or getattr(error, "errno", None) == 28:
        return "free some disk space"
    if "readonly" in text or "unable to open" in text or "permission" in text.lower():
        return "choose a directory that you may write to"
    if "malformed" in text or "not a database" in text:
        return "it is damaged or no journal; restore it from a copy, or use another run directory"
    return "check the disk"
