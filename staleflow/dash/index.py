"""The index of one run: its journal followed as it grows, so that no question reads a whole file.

    index = Index(directory)
    while index.catch_up(): pass                # some thousand events each; False: everything is read
    index.trajectories(state="dropped", limit=50)
    index.save(); index.close()

Trajectories that ended and what is on the timeline go into SQLite (``index.db`` in the run directory, which may be
deleted at any time; a temporary file if the directory cannot be written), the state of what is live into memory. It is
saved with the place in the journal, so that the next to look continues there. One thread catches up, any may ask.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from staleflow.dash.replica import Ended, Mark, Replica
from staleflow.errors import RunError, line_of
from staleflow.run.directory import RunDirectory
from staleflow.run.events import EventReader, Place
from staleflow.servers.database import read_only

FORMAT = 1
ROWS = 8
"""Transactions of the journal that are read at once."""
SLICE = 1_000
"""Events that are applied between two looks at who waits for an answer."""
SAVE_EVENTS = 500_000
"""That are read again at most where a page was ended by force."""
COLUMNS = ", ".join("grp" if each == "group" else each for each in Ended._fields)
SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE trajectory(id INTEGER PRIMARY KEY, {COLUMNS});
CREATE INDEX by_name ON trajectory(name);
CREATE INDEX by_state ON trajectory(state, reason);
CREATE INDEX by_step ON trajectory(step);
CREATE TABLE mark({", ".join(Mark._fields)});
CREATE INDEX by_time ON mark(lane, time);
"""


class Index:
    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.lock = threading.RLock()
        """Held while events are applied: whoever reads ``replica`` takes it."""
        self.replica: Replica | None = None
        """None until there is a journal."""
        self.trouble = ""
        """Why the journal cannot be followed."""
        self.behind = 0
        """Events that are still to be read."""
        self.place: Place | None = None
        """How far the journal has been read."""
        self._unsaved = 0
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._owned = -1
        """The lock of ``index.db``: of several pages of a run, one keeps it, the others one of their own."""
        self._db = self._open()
        self._readers: list[sqlite3.Connection] = []
        """Connections that nobody asks by now."""
        self._load()

    # Following

    def catch_up(self) -> bool:
        """Read some more. Whether there is still more to read."""
        if self.trouble:
            return False
        reader = EventReader(self.directory, self.place)
        try:
            before = reader.place
            events = reader.read(ROWS)
            if reader.place.journal != before.journal:
                self._begin(reader.place)
                return True
            if not events:
                return False
            assert self.replica is not None
            for at in range(0, len(events), SLICE):
                with self.lock:
                    self.replica.follow(events[at : at + SLICE], before.position, reader.place.position)
                    self.place = reader.place
            self._unsaved += len(events)
            self.behind = reader.behind
            if self._unsaved >= SAVE_EVENTS:
                self.save()
            elif not self.behind or len(self.replica.ended) > 5_000:
                self._flush()
        except sqlite3.OperationalError:  # it is locked for a moment, or just being replaced
            return False
        except (sqlite3.Error, ValueError, KeyError, IndexError, TypeError, RunError) as error:
            self.trouble = f"the journal of {self.directory.path} cannot be followed ({line_of(error)})"
        return not self.trouble

    def _begin(self, place: Place) -> None:
        """A journal that is new to this index."""
        with closing(read_only(self.directory.journal(place.journal))) as db:
            found = db.execute("SELECT value FROM meta WHERE key='settings'").fetchone()
            snapshot = db.execute("SELECT position, body FROM snapshot").fetchone() if place.journal > 1 else None
        if found is None:
            return  # it is being made
        settings = json.loads(found[0])
        with self.lock:
            if snapshot is None:
                self.replica = Replica(settings)
            else:
                self.replica = Replica.of_snapshot(settings, msgspec.msgpack.decode(snapshot[1]))
                place = Place(place.journal, snapshot[0])
            self.place = place

    def _flush(self) -> None:
        """Put what ended into the database."""
        if (replica := self.replica) is None or not (replica.ended or replica.marks):
            return
        ended, replica.ended = replica.ended, []
        marks, replica.marks = replica.marks, []
        places = ", ".join("?" * len(Ended._fields))
        with self._db:
            self._db.executemany(f"INSERT INTO trajectory VALUES(NULL, {places})", ended)
            self._db.executemany("INSERT INTO mark VALUES(?, ?, ?, ?)", marks)

    def save(self) -> None:
        """All of it, with the place in the journal."""
        if self.replica is None or self.place is None:
            return
        self._flush()
        state = msgspec.msgpack.encode({"place": self.place, "replica": self.replica.to_state()})
        last = self._db.execute("SELECT max(id) FROM trajectory").fetchone()[0] or 0
        marks = self._db.execute("SELECT max(rowid) FROM mark").fetchone()[0] or 0
        with self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO meta VALUES(?, ?)",
                [("state", state), ("trajectories", last), ("marks", marks)],
            )
        self._unsaved = 0

    def close(self) -> None:
        with suppress(sqlite3.Error):
            if self._unsaved:
                self.save()
        for db in (*self._readers, self._db):
            db.close()
        if self._temporary is not None:
            self._temporary.cleanup()
        if self._owned >= 0:
            os.close(self._owned)
            self._owned = -1

    # Questions

    def trajectories(
        self,
        state: str = "",
        reason: str = "",
        step: int | None = None,
        name: str = "",
        before: int = 0,
        limit: int = 50,
    ) -> tuple[list[Ended], int]:
        """Of those that ended, the latest first, and from where to continue (0: that was all)."""
        where, values = list[str](), list[Any]()
        for column, value in (("state", state), ("reason", reason), ("step", step)):
            if value not in ("", None):
                where.append(f"{column} = ?")
                values.append(value)
        if name:
            where.append("name >= ? AND name < ?")
            values += [name, name + "\uffff"]
        if before:
            where.append("id < ?")
            values.append(before)
        condition = f"WHERE {' AND '.join(where)}" if where else ""
        rows = self._ask(f"SELECT * FROM trajectory {condition} ORDER BY id DESC LIMIT ?", (*values, limit + 1))
        found = [Ended(*row[1:]) for row in rows[:limit]]
        return found, rows[limit - 1][0] if len(rows) > limit else 0

    def trajectory(self, name: str) -> Ended | None:
        """The latest of this name that ended: after a resume there may be several."""
        rows = self._ask("SELECT * FROM trajectory WHERE name = ? ORDER BY id DESC LIMIT 1", (name,))
        return Ended(*rows[0][1:]) if rows else None

    def count(self) -> int:
        return self._ask("SELECT max(id) FROM trajectory", ())[0][0] or 0

    def marks(self, lane: str, begin: float, end: float, limit: int) -> list[Mark]:
        query = "SELECT * FROM mark WHERE lane = ? AND time BETWEEN ? AND ? ORDER BY time LIMIT ?"
        return [Mark(*row) for row in self._ask(query, (lane, begin, end, limit))]

    def marks_together(self, lane: str, begin: float, end: float, columns: int) -> list[tuple[float, str, str, int]]:
        """Those of one kind in one of ``columns`` equal parts of the time as one: the first, and how many."""
        width = max(1e-9, (end - begin) / columns)
        query = (
            "SELECT min(time), kind, value, count(*) FROM mark WHERE lane = ? AND time BETWEEN ? AND ? "
            "GROUP BY CAST((time - ?) / ? AS INTEGER), kind ORDER BY 1"
        )
        return self._ask(query, (lane, begin, end, begin, width))

    def _ask(self, query: str, values: Sequence[Any]) -> list[Any]:
        """By a connection that nobody else uses meanwhile; if the file was deleted since, by the one that still has it.
        There are as many as were ever asked at once: SQLite closes no file of a database that another one reads."""
        try:
            db = self._readers.pop()
        except IndexError:
            try:
                db = read_only(self._path)
            except sqlite3.OperationalError:
                return self._db.execute(query, tuple(values)).fetchall()
        try:
            return db.execute(query, tuple(values)).fetchall()
        finally:
            self._readers.append(db)

    # The file

    def _open(self) -> sqlite3.Connection:
        self._path = self.directory.path / "index.db"
        try:
            self._owned = os.open(self.directory.path / "index.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._connected(self._path)
        except (sqlite3.Error, OSError):  # read-only, damaged, or another page has it
            self._temporary = tempfile.TemporaryDirectory(prefix="staleflow-index-")
            self._path = Path(self._temporary.name) / "index.db"
            return self._connected(self._path)

    def _connected(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, check_same_thread=False)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
                db.execute(f"DROP TABLE {name}")
            for statement in filter(str.strip, SCHEMA.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={FORMAT}")
        db.commit()
        return db

    def _load(self) -> None:
        """Where the last page stopped; what it had put down after it had saved is read again."""
        kept = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        with self._db:
            self._db.execute("DELETE FROM trajectory WHERE id > ?", (kept.get("trajectories", 0),))
            self._db.execute("DELETE FROM mark WHERE rowid > ?", (kept.get("marks", 0),))
        if "state" in kept:
            state = msgspec.msgpack.decode(kept["state"], strict=False)
            place = Place(*state["place"])
            if place.journal in self.directory.journals:
                self.replica, self.place = Replica.restored(state["replica"]), place
