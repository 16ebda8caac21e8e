"""The journal on disk: whatever is cut off or broken, what comes back is the state after a whole prefix of events."""

import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from staleflow.files import no_room
from staleflow.servers import payload_files
from staleflow.servers.database import DamagedError, JournalError, readable, take_lock, torn_bytes
from staleflow.servers.durable import DurableJournal
from staleflow.servers.journal import Event
from staleflow.servers.made import rows_of
from staleflow.servers.payloads import Chunk
from staleflow.servers.state import recover
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Row
from tests.servers.random_server import RandomActs, image, new_server
from tests.servers.small_server import Source


class Pictured(DurableJournal):
    """Remembers what the server looked like after each event."""

    server: TrajectoryServer | None = None

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.images: dict[int, str] = {}

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        super().append(event, kept, dropped)
        if self.server is not None:
            self.images[self.position] = image(self.server)


def random_journal(path: Path, seed: int, count: int, snapshot_events: int = 10**9) -> tuple[Pictured, list[int]]:
    """A server used at random and committed at random moments: its open journal, and the durable positions."""
    journal = Pictured(path, threaded=False, snapshot_events=snapshot_events)
    server = new_server(journal)
    recover(server, journal)
    journal.server = server
    journal.images[journal.position] = image(server)
    random = Random(seed)
    acts, durable = RandomActs(server, random), [journal.durable]
    for _ in range(count):
        acts.act()
        if random.random() < 0.2:
            journal.commit()
            durable.append(journal.durable)
    return journal, durable


def reopened(path: Path) -> tuple[DurableJournal, TrajectoryServer]:
    journal = DurableJournal(path, threaded=False)
    server = new_server(journal)
    recover(server, journal)
    return journal, server


def copied(path: Path, to: Path) -> Path:
    """The files as they are on disk at this moment, as a crash would leave them."""
    to.mkdir()
    for each in path.parent.glob(f"{path.name}*"):
        if each.is_dir():
            shutil.copytree(each, to / each.name)
        elif not each.name.endswith(".lock"):
            shutil.copy(each, to / each.name)
    return to / path.name


@pytest.mark.parametrize("snapshot_events", [10**9, 25], ids=["no snapshots", "many snapshots"])
@pytest.mark.parametrize("seed", range(6))
def test_a_crash_at_any_moment_leaves_the_state_after_the_last_durable_event(
    tmp_path: Path, seed: int, snapshot_events: int
) -> None:
    journal, _ = random_journal(tmp_path / "a" / "journal.db", seed, 300, snapshot_events)
    crashed = copied(journal.path, tmp_path / "b")
    again, server = reopened(crashed)
    assert again.durable == journal.durable
    assert image(server) == journal.images[journal.durable]
    assert again.notes == []


@pytest.mark.parametrize("seed", range(4))
def test_attempts_can_follow_each_other_and_nothing_is_lost_between_them(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal.db"
    for attempt in range(6):
        journal, _ = random_journal(path, seed * 100 + attempt, 80, snapshot_events=40)
        journal.close()
        again, server = reopened(path)
        assert image(server) == journal.images[journal.position]
        assert again.position == journal.position
        again.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_log_that_ends_at_any_byte_opens_at_a_whole_prefix_and_says_what_it_dropped(
    tmp_path: Path, seed: int
) -> None:
    journal, durable = random_journal(tmp_path / "a" / "journal.db", seed, 150, snapshot_events=60)
    random = Random(seed)
    for cut in range(10):
        crashed = copied(journal.path, tmp_path / f"b{cut}")
        wal = crashed.with_name(crashed.name + "-wal")
        size = random.randrange(wal.stat().st_size + 1)
        with wal.open("r+b") as file:
            file.truncate(size)
        torn = torn_bytes(crashed)
        if size <= 32 + 24:  # the schema itself was never finished: an empty journal
            continue
        again, server = reopened(crashed)
        assert again.durable in durable
        assert image(server) == journal.images[again.durable]
        assert bool(again.notes) == bool(torn)
        assert all(f"dropped {torn} bytes" in note for note in again.notes)
        again.close()


def test_garbage_behind_the_last_commit_is_left_out(tmp_path: Path) -> None:
    journal, durable = random_journal(tmp_path / "a" / "journal.db", 3, 150)
    crashed = copied(journal.path, tmp_path / "b")
    with crashed.with_name(crashed.name + "-wal").open("ab") as wal:
        wal.write(Random(1).randbytes(40_000))
    again, server = reopened(crashed)
    assert again.durable == durable[-1]
    assert image(server) == journal.images[again.durable]


def test_the_writer_thread_makes_everything_durable_in_order(tmp_path: Path) -> None:
    journal = Pictured(tmp_path / "journal.db")
    server = new_server(journal)
    recover(server, journal)
    journal.server = server
    acts = RandomActs(server, Random(5))
    for _ in range(400):
        acts.act()
    journal.close()
    assert journal.durable == journal.position
    _, server = reopened(journal.path)
    assert image(server) == journal.images[journal.position]


def test_payload_of_what_was_consumed_or_given_up_leaves_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_files, "FILE_BYTES", 1_000)
    journal, _ = random_journal(tmp_path / "journal.db", 1, 1_200)
    server = journal.server
    assert server is not None
    assert server.payloads is not None
    journal.commit()
    files = sorted((tmp_path / "journal.db-payload").iterdir())
    assert server.ledger.counts()["committed"] > 20
    assert int(files[-1].stem) > 2 * len(files), "old files are deleted"
    live_names = {each.name for each in server if each.state != "aborted"} | set(server.groups)
    kept = {name for step in server.made.values() for name in step.names()}
    tokens = sum(len(chunk.tokens) for _, chunk in journal.payloads(live_names, kept)) // 4
    assert tokens == sum(server.payloads.tokens(name).size for name in live_names)
    journal.close()
    (tmp_path / "journal.db-payload" / "99999999.bin").write_bytes(b"begun, and never committed")
    _, again = reopened(journal.path)
    assert image(again) == image(server)
    assert not (tmp_path / "journal.db-payload" / "99999999.bin").exists()


@pytest.mark.parametrize("seed", range(4))
def test_steps_since_the_last_checkpoint_can_be_fed_again_after_a_crash(tmp_path: Path, seed: int) -> None:
    """What the trainer was fed comes back row by row, in the order of the groups; what was forgotten does not."""
    fed: dict[int, list[Row]] = {}
    journal = Pictured(tmp_path / "a" / "journal.db", threaded=False, snapshot_events=60)
    server = new_server(journal)
    acts = RandomActs(server, Random(seed))
    for at in range(900):
        ledger = server.ledger
        if ledger.frontier > ledger.version:
            fed[ledger.version] = server.rows(server.groups[name] for name in server.leased)
        acts.act()
        if at % 7 == 0:
            journal.commit()
    journal.commit()
    again, recovered = reopened(copied(journal.path, tmp_path / "b"))
    assert recovered.made.keys() == server.made.keys()
    assert recovered.made
    for step, made in recovered.made.items():
        assert [row for group in rows_of(made, again) for row in group] == fed[step]
        assert made.bytes == sum(len(row.token_bytes) * 2 for row in fed[step]) + 4 * sum(
            recovered_prompt(group) for group in rows_of(made, again)
        )
    recovered.forget(recovered.ledger.version)
    again.commit()
    assert recovered.made == {}
    assert not any(name in again for step in server.made.values() for name in step.names())


def recovered_prompt(group: list[Row]) -> int:
    return len(group[0].prompt_bytes) // 4


# What cannot be opened, read or written


def test_a_second_owner_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    first = DurableJournal(tmp_path / "journal.db")
    with pytest.raises(JournalError, match=r"belongs to process \d+, which is running: stop it, or use another"):
        DurableJournal(tmp_path / "journal.db")
    first.close()
    DurableJournal(tmp_path / "journal.db").close()


def test_others_may_read_while_the_owner_writes(tmp_path: Path) -> None:
    journal, _ = random_journal(tmp_path / "journal.db", 2, 50)
    journal.commit()
    reader = sqlite3.connect(f"file:{journal.path}?mode=ro", uri=True)
    assert reader.execute("SELECT sum(count) FROM log").fetchone() == (journal.durable,)


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    DurableJournal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value=99 WHERE key='format'")
    before = path.read_bytes()
    with pytest.raises(JournalError, match="format 99, this version of StaleFlow reads format 1: update StaleFlow"):
        DurableJournal(path)
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("a diary, dear reader, and not a data base; " * 100)
    with pytest.raises(JournalError, match=r"cannot open the journal .*use another run directory"):
        DurableJournal(path)


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(JournalError, match=r"cannot write in /proc/.*choose a directory that you may write to"):
        DurableJournal("/proc/nothing/journal.db")


def test_other_settings_than_the_run_was_started_with_are_refused(tmp_path: Path) -> None:
    journal = DurableJournal(tmp_path / "journal.db", threaded=False)
    recover(new_server(journal), journal)
    with pytest.raises(JournalError, match="started with group_size=2, not 4: resume it with the same settings"):
        journal.belongs_to({"batch_size": 2, "max_staleness": 1, "redundancy": 1, "group_size": 4, "extra_members": 1})


@pytest.mark.parametrize("table", ["log", "snapshot"])
def test_a_damaged_row_is_noticed(tmp_path: Path, table: str) -> None:
    journal, _ = random_journal(tmp_path / "journal.db", 4, 200, snapshot_events=30)
    expected = image(journal.server)  # type: ignore[arg-type]
    journal.close()
    with sqlite3.connect(journal.path) as db:
        row, body = db.execute(f"SELECT rowid, body FROM {table} ORDER BY rowid DESC LIMIT 1").fetchone()
        db.execute(f"UPDATE {table} SET body=? WHERE rowid=?", (bytes([body[0] ^ 1]) + body[1:], row))
    if table == "snapshot":  # the events are still there
        again, server = reopened(journal.path)
        assert image(server) == expected
        assert "the snapshot is damaged" in again.notes[0]
    else:
        with pytest.raises(JournalError, match=r"is damaged: events \d+ to \d+"):
            reopened(journal.path)


def test_damaged_payload_is_noticed(tmp_path: Path) -> None:
    journal, _ = random_journal(tmp_path / "journal.db", 4, 200)
    journal.close()
    file = max((tmp_path / "journal.db-payload").iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(JournalError, match=r"-payload is damaged: \d+ bytes at \d+ of file \d+ cannot be read"):
        reopened(journal.path)


def test_a_missing_batch_of_events_is_noticed(tmp_path: Path) -> None:
    journal, _ = random_journal(tmp_path / "journal.db", 4, 200)
    journal.close()
    with sqlite3.connect(journal.path) as db:
        db.execute("DELETE FROM log WHERE last=(SELECT last FROM log ORDER BY last LIMIT 1 OFFSET 3)")
    with pytest.raises(JournalError, match="is damaged: events"):
        reopened(journal.path)


def test_a_full_disk_loses_nothing_and_the_run_continues_when_there_is_room_again(tmp_path: Path) -> None:
    journal = Pictured(tmp_path / "journal.db", threaded=False)
    server = new_server(journal)
    recover(server, journal)
    journal.server = server
    acts = RandomActs(server, Random(7))
    for _ in range(50):
        acts.act()
    journal.commit()
    durable = journal.durable
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    for _ in range(2_000):
        acts.act()
    with pytest.raises(JournalError, match=r"full\): free some disk space; nothing is lost meanwhile"):
        journal.commit()
    assert (journal.durable, journal.trouble is None) == (durable, False)
    crashed, old = reopened(copied(journal.path, tmp_path / "b"))
    assert image(old) == journal.images[durable] == journal.images[crashed.durable]
    journal._db.execute("PRAGMA max_page_count=1000000")
    journal.commit()
    assert (journal.durable, journal.trouble) == (journal.position, None)
    _, server = reopened(copied(journal.path, tmp_path / "c"))
    assert image(server) == journal.images[journal.position]


def test_a_full_disk_is_not_taken_for_a_damaged_journal(tmp_path: Path) -> None:
    """A run that was opened on a full disk would have continued from its checkpoint alone."""
    with pytest.raises(JournalError, match="free some disk space") as found, readable(tmp_path / "journal.db"):
        raise OSError(28, "No space left on device")
    assert not isinstance(found.value, DamagedError)
    assert no_room(found.value)
    with pytest.raises(DamagedError) as found, readable(tmp_path / "journal.db"):
        raise OSError(5, "Input/output error")
    assert not no_room(found.value)


def test_a_journal_is_locked_also_where_there_is_no_room_to_say_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("staleflow.servers.database.os.pwrite", full)
    handle = take_lock(tmp_path / "journal.db")
    with pytest.raises(JournalError, match="belongs to process unknown"):
        take_lock(tmp_path / "journal.db")
    os.close(handle)


def test_payload_that_finds_no_room_waits_and_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = random_journal(tmp_path / "journal.db", 8, 60)
    server = journal.server
    assert server is not None
    journal.commit()
    durable, acts = journal.durable, RandomActs(server, Random(8))
    for _ in range(200):
        acts.act()
    with monkeypatch.context() as full:
        full.setattr(
            payload_files.os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        for _ in range(3):
            with pytest.raises(JournalError, match=r"No space left on device\): free some disk space"):
                journal.commit()
    assert journal.durable == durable
    journal.close()
    _, again = reopened(journal.path)
    assert image(again) == journal.images[journal.position]


def test_a_kill_loses_no_page_cache_so_syncing_is_watched_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a power failure would show a missing sync: payload must be synced before the data base commits it."""
    journal, _ = random_journal(tmp_path / "journal.db", 2, 30)
    journal.commit()
    done: list[str] = []
    synced = payload_files.os.fdatasync
    monkeypatch.setattr(payload_files.os, "fdatasync", lambda handle: (synced(handle), done.append("synced")))
    journal._db.set_trace_callback(lambda statement: done.append(statement.split()[0]))
    server = journal.server
    assert server is not None
    server.admit(Source(first=3))
    journal.commit()
    assert done[0] == "synced"
    assert done[-1] == "COMMIT"
    journal._db.set_trace_callback(None)
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL: a commit returns when it is on disk"
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = DurableJournal(tmp_path / "journal.db")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed: admit cannot be written any more"):
        journal.append(("admit", 0, 0, 3))
