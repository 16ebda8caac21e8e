"""The database file of a journal: its tables, its lock, and what a crash left unfinished in it."""

import fcntl
import os
import sqlite3
import struct
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path

from staleflow.errors import RunError, line_of
from staleflow.files import no_room

FORMAT = 1
DAMAGED = "it is damaged or not a journal; restore it from a copy, or use another run directory"

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE log(last INTEGER PRIMARY KEY, count INTEGER, crc INTEGER, body BLOB);
CREATE TABLE snapshot(position INTEGER PRIMARY KEY, crc INTEGER, body BLOB);
CREATE TABLE payload(id INTEGER PRIMARY KEY, file INTEGER, start INTEGER, size INTEGER, crc INTEGER);
"""


class JournalError(RunError):
    """The journal cannot be opened, read or written; the message says what to do."""


class DamagedError(JournalError):
    """It is not what was written, or not all of it: a run may continue from a checkpoint instead."""


def read_only(path: Path) -> sqlite3.Connection:
    """A database that somebody else writes. Its path may have any characters: those of an address are escaped. Threads
    may pass the connection on."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, check_same_thread=False)


def torn_bytes(path: Path) -> int:
    """How many bytes at the end of the write-ahead file belong to a transaction that was never finished.

    SQLite ignores them by itself; this is for the note about it. A frame is 24 bytes and a page; the second word of one
    that ends a transaction is not zero; frames of the current round carry the salt of the file's header."""
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


def take_lock(path: Path) -> int:
    """Hold the lock file beside the journal; ``JournalError`` names the process that holds it already."""
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
        owner = os.pread(handle, 32, 0).decode(errors="replace") or "unknown"
        os.close(handle)
        raise JournalError(
            f"the journal {path} belongs to process {owner}, which is running: stop it, or use another run directory"
        ) from error
    with suppress(OSError):  # a full disk: then nobody can say who owns it
        os.truncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def open_database(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            db.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES('format', {FORMAT}); COMMIT;")
        found = db.execute("SELECT value FROM meta WHERE key='format'").fetchone()
        if found == (FORMAT,) and tables(db) != the_tables():
            raise sqlite3.DatabaseError("malformed: other tables than were made")
        if (wrong := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"malformed: {' '.join(wrong.split())}")
    except UnicodeDecodeError as error:  # SQLite quotes the damaged bytes in its own message
        raise DamagedError(f"cannot open the journal {path} (malformed): {fix_for(error)}") from error
    except sqlite3.Error as error:
        kind = DamagedError if (fix := fix_for(error)) == DAMAGED else JournalError
        raise kind(f"cannot open the journal {path} ({line_of(error)}): {fix}") from error
    if found is None or found[0] != FORMAT:
        db.close()
        written = "another program" if found is None else f"format {found[0]}"
        raise JournalError(
            f"the journal {path} was written by {written}, this version of StaleFlow reads format {FORMAT}: "
            "update StaleFlow, or use another run directory"
        )
    return db


def tables(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    """The definitions that SQLite reads the file by. It believes them: one changed letter can give other rows."""
    return db.execute("SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master ORDER BY rowid").fetchall()


@cache
def the_tables() -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return tables(db)


@contextmanager
def readable(path: Path) -> Generator[None]:
    """Turn what reading a damaged file raises into one line. SQLite notices some damage, other gives odd values."""
    try:
        yield
    except (sqlite3.Error, OSError, TypeError, ValueError, KeyError, OverflowError) as error:
        if no_room(error):  # a full disk must not be taken for damage: the run would continue from a checkpoint alone
            raise JournalError(f"cannot read the journal {path} ({line_of(error)}): {fix_for(error)}") from error
        raise DamagedError(
            f"the journal {path} is damaged ({line_of(error)}): restore it from a copy, or start a new run from "
            "the latest checkpoint"
        ) from error


def fix_for(error: Exception) -> str:
    text = str(error)
    if no_room(error):
        return "free some disk space"
    if "readonly" in text or "unable to open" in text or "permission" in text.lower():
        return "choose a directory that you may write to"
    if "malformed" in text or "not a database" in text:
        return DAMAGED
    return "check the disk"
