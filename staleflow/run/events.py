"""What happened in a run, event by event and with its time, from its journal: for ``why``, reports and the page.

    for each in read_events(directory):                         # all, oldest first
        each.time, each.event                                   # 12.35, ("route", "p7/0", "i1", 3)
    for each in read_events(directory, about=["p7/0", "p7"]):   # those that name one of these; fast in a long run
        ...
    read_events(directory, kinds=["evaluated"])                 # those of these kinds
    read_events(directory, about=["i3"], kinds=["pull", "lost"])    # of these kinds, and first naming that
    read_commits(directory)                                     # where and when each step was committed

    reader = EventReader(directory)                             # to follow a run that is alive, or to continue later
    while batch := reader.read(): ...                           # what is new; empty if nothing is
    EventReader(directory, reader.place)

Events are tuples: the kind, then values. ``servers/book.py`` has those that change the state of trajectories:

    admit prompt attempt prompt_tokens     reserve group version        lower / renew group version
    route name instance epoch              stream name spans            interrupt / requeue name
    generated name spans                   score name reward            occupy group
    release group reason again             lease groups                 consume groups aborted
    commit step                            rollback step                misreport name why

where environments play (``admit`` then has one more value, True) also

    given name count until                 turn name spans reason       branch parent shared
    ended name reward masked               again name why

and these are notes: ``join name version``, ``lost name``, ``left name`` (instances), ``pull name version``,
``evaluating version``, ``evaluated version accuracy figures binary``, ``counted table what why``, ``trained ...``,
``scale ...``; under simulation also ``fault ...`` and ``decision time inputs commands``. A time is that of training, in
seconds as in ``metrics.jsonl``, exact to 0.05 s; after a resume it starts again where the last step before it ended.
Only reading: any number may, while a run is alive and afterwards.
"""

from __future__ import annotations

import re
import sqlite3
import struct
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import Any, NamedTuple, cast

import msgspec

from staleflow.run.directory import RunDirectory
from staleflow.servers.book import group_name, of_group
from staleflow.servers.database import read_only, readable
from staleflow.servers.durable import frozen
from staleflow.servers.journal import TIME, Event

ROWS = 64
"""Transactions of the journal that are read at once."""
_GROUP = re.compile(r"p\d+(\.\d+)?")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_STAMP, _FLOAT = msgspec.msgpack.encode((TIME, 0.0))[:-8], struct.Struct(">d")
"""What a time looks like in a transaction that is not decoded."""
_COMMIT = msgspec.msgpack.encode(("commit", 0))[:-1]


class Timed(NamedTuple):
    time: float
    """Seconds of training."""
    event: Event


class Place(NamedTuple):
    """How far a reader has read."""

    journal: int = 0
    """Its number: a run that could not continue its journal has begun another."""
    position: int = 0
    """Events read."""
    time: float = 0.0


class EventReader:
    def __init__(self, directory: RunDirectory, place: Place | None = None) -> None:
        self._directory = directory
        self.place = place or Place()
        self.behind = 0
        """Events that were there at the last reading and have not been read."""

    def read(self, rows: int = ROWS) -> list[Timed]:
        """The next events, at most of ``rows`` transactions. Empty: there are none yet, or a new journal has begun
        (``place.journal`` has changed)."""
        newest, self.behind = max(self._directory.journals, default=0), 0
        begun = newest != self.place.journal
        if begun:
            self.place = Place(newest)
        if not newest:
            return []
        with closing(_open(self._directory, newest)) as db:
            if begun:
                self.behind = _end(db)
                return []
            found = db.execute(
                "SELECT last, body FROM log WHERE last > ? ORDER BY last LIMIT ?", (self.place.position, rows)
            ).fetchall()
            end = _end(db) if len(found) == rows else 0  # otherwise that was all
        time, events = self.place.time, list[Timed]()
        for _, body in found:
            for event in cast(list[Any], _decode(body)):
                if event[0] == TIME:
                    time = event[1]
                else:
                    events.append(Timed(time, frozen(event)))
        if found:
            self.place = Place(newest, found[-1][0], time)
        self.behind = max(0, end - self.place.position)
        return events


def read_events(
    directory: RunDirectory,
    about: Collection[str] = (),
    first: int = 0,
    last: int = 1 << 62,
    kinds: Collection[str] = (),
) -> Iterator[Timed]:
    """The events of the journal that counts, after the first ``first`` and up to ``last``, perhaps only those that
    name one of ``about`` (with ``kinds``: as their first value), or are of one of ``kinds``."""
    if not (newest := max(directory.journals, default=0)):
        return
    wanted, words = frozenset(about), [word for name in about for word in _words(name)]
    if kinds:
        words = [_encode(kind) + word for kind in kinds for word in (map(_encode, about) if about else [b""])]
    time = 0.0
    with readable(directory.journal(newest)), closing(_open(directory, newest)) as db:
        rows = db.execute("SELECT body FROM log WHERE last > ? AND last - count < ? ORDER BY last", (first, last))
        for (body,) in rows:
            if words and not any(word in body for word in words):
                if (at := body.rfind(_STAMP)) >= 0:
                    (time,) = _FLOAT.unpack_from(body, at + len(_STAMP))
                continue
            for event in cast(list[Any], _decode(body)):
                if event[0] == TIME:
                    time = event[1]
                elif (
                    event[0] in kinds and (not wanted or event[1] in wanted)
                    if kinds
                    else not wanted or _names(event, wanted)
                ):
                    yield Timed(time, frozen(event))


class Commit(NamedTuple):
    """Where in the journal a step was committed."""

    step: int
    time: float
    first: int
    """Events before the transaction it is in."""
    last: int
    """Events up to the end of it."""


def read_commits(directory: RunDirectory) -> list[Commit]:
    """Every committed step, oldest first, without decoding anything: tens of milliseconds for millions of events. A
    step that was made again counts where it was committed last."""
    found: dict[int, Commit] = {}
    if not (newest := max(directory.journals, default=0)):
        return []
    time = 0.0
    with readable(directory.journal(newest)), closing(_open(directory, newest)) as db:
        for last, count, body in db.execute("SELECT last, count, body FROM log ORDER BY last"):
            begin = 0
            while (at := body.find(_COMMIT, begin)) >= 0:
                if (stamp := body.rfind(_STAMP, begin, at)) >= 0:
                    (time,) = _FLOAT.unpack_from(body, stamp + len(_STAMP))
                begin = at + len(_COMMIT)
                step = _whole_number(body, begin)
                found[step] = Commit(step, time, last - count, last)
            if (stamp := body.rfind(_STAMP, begin)) >= 0:
                (time,) = _FLOAT.unpack_from(body, stamp + len(_STAMP))
    return [found[step] for step in sorted(found)]


def _whole_number(body: bytes, at: int) -> int:
    """The one that is encoded there."""
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(body[at], 0)
    return int.from_bytes(body[at + 1 : at + 1 + size], "big") if size else body[at]


def _open(directory: RunDirectory, number: int) -> sqlite3.Connection:
    return read_only(directory.journal(number))


def _end(db: sqlite3.Connection) -> int:
    return db.execute("SELECT max(last) FROM log").fetchone()[0] or 0


def _words(name: str) -> Iterator[bytes]:
    """As it is in a transaction: with its length, so that p1 is not found in p17. Admissions do not name the group."""
    yield _encode(name)
    if _GROUP.fullmatch(name):
        yield b"".join(map(_encode, ("admit", *of_group(name))))


def _names(event: list[Any], wanted: Collection[str]) -> bool:
    if event[0] == "admit":
        return group_name(event[1], event[2]) in wanted
    for value in event:  # thousands for each that is found
        if type(value) is str:
            if value in wanted:
                return True
        elif type(value) is list and any(type(each) is str and each in wanted for each in cast(list[Any], value)):
            return True
    return False
