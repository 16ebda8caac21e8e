"""How fast the data servers are: trajectories from admission to commit, recovery, weights.

    python bench/servers.py            # tables
    python bench/servers.py --json     # the same as JSON
    python bench/servers.py --quick    # smaller, for a look

*Lifecycle*: groups are admitted, reserved, routed, streamed in chunks, generated, scored, completed, leased, packed for
the trainer and committed, with real payload, on one thread and the journal's writer thread. The clock stops when the
last event is durable. Rounds with the journal on disk and in memory alternate; figures are medians.
*Memory*: what Python allocated for live trajectories, by tracemalloc. *Kept*: committed steps stay on disk until a
checkpoint is made; CPU time of a whole life with and without. *Recovery*: a new process's work, in this one.
*Stores*: why the journal is on SQLite: the same bytes through it and through a bare file. *Weights*: bench/weights.py.
"""

import argparse
import gc
import itertools
import json
import os
import resource
import shutil
import sqlite3
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from weights import measure as measure_weights
from weights import table as weights_table

from staleflow.protocol import StalenessLedger
from staleflow.servers.durable import SNAPSHOT_EVENTS, DurableJournal
from staleflow.servers.journal import Journal, MemoryJournal
from staleflow.servers.payloads import TOKEN_BYTES, Chunk, Limits, Payloads, pack
from staleflow.servers.state import recover
from staleflow.servers.trajectories import TrajectoryServer

TARGETS = {
    "trajectories_per_s": 5_000,  # of 2,000 tokens, durable
    "bytes_per_token": 12,
    "bytes_per_trajectory": 1_024,
    "recovery_s": 10,  # of a million events
}
LENGTHS = (16, 2_000, 20_000)
CHUNK = 512
"""Tokens between two streams."""
GROUPS, MEMBERS, PROMPT = 32, 16, 64


class Prompts:
    def tokens(self, prompt: int) -> int | None:  # noqa: ARG002  # all alike
        return PROMPT

    def ids(self, prompt: int) -> bytes:
        return np.full(PROMPT, prompt % 1_000, "<i4").tobytes()


def new_server(journal: Journal, length: int) -> TrajectoryServer:
    return TrajectoryServer(
        StalenessLedger(GROUPS, 1), MEMBERS, 0, journal, Payloads(Limits(max(length, 1), PROMPT, 150_000))
    )


class Driver:
    """Takes trajectories of one length from admission to commit. Their content is made beforehand, off the clock."""

    def __init__(self, journal: Journal, length: int) -> None:
        random = np.random.default_rng(1)
        self.server = new_server(journal, length)
        tokens = random.integers(0, 150_000, length)
        logprobs = -random.random(length)
        cuts = [*range(0, length, CHUNK), length]
        self.chunks = [
            (end, Chunk.of(start, tokens[start:end], logprobs[start:end])) for start, end in itertools.pairwise(cuts)
        ]
        self.prompts = Prompts()

    def step(self) -> None:
        """One training step: its groups from the prompt to the commit."""
        server, version = self.server, self.server.ledger.version
        groups = [group for _ in range(GROUPS) if (group := server.admit(self.prompts)) is not None]
        for group in groups:
            for one in group.members:
                self.run(one.name, version)
        taken, _ = server.consume()
        pack(server.rows(taken))
        server.commit(version)

    def run(self, name: str, version: int) -> None:
        server = self.server
        placed = server.place(name, "i0", version)
        assert placed is not None
        for end, chunk in self.chunks[:-1]:
            server.stream(name, 1, ((version, end),), chunk)
        end, chunk = self.chunks[-1]
        server.generated(name, 1, ((version, end),), chunk)
        server.score(name, 1.0)


def lifecycle(folder: Path, length: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Trajectories per second with the journal on disk, and in memory, in alternating rounds."""
    speeds: dict[str, list[float]] = {"disk": [], "memory": []}
    disk: dict[str, float] = {}
    cpu: list[float] = []
    for turn in range(rounds):
        for kind in speeds:
            path = folder / f"turn{turn}" / "journal.db"
            journal = DurableJournal(path) if kind == "disk" else MemoryJournal(keep=False)
            driver = Driver(journal, length)
            if isinstance(journal, DurableJournal):
                recover(driver.server, journal)
            driver.step()
            began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            steps = 0
            before = journal.position
            while time.perf_counter() - began < seconds or steps < 2:
                driver.step()
                steps += 1
                if isinstance(journal, DurableJournal):  # the world is one step behind, never more
                    journal.wait(before, timeout_s=60)
                    before = journal.position
            if isinstance(journal, DurableJournal):
                journal.commit()
                assert journal.durable == journal.position
            wall = time.perf_counter() - began
            speeds[kind].append(steps * GROUPS * MEMBERS / wall)
            if isinstance(journal, DurableJournal):
                now = resource.getrusage(resource.RUSAGE_SELF)
                cpu.append((now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) / wall)
                disk = _disk_use(journal, (steps + 1) * GROUPS * MEMBERS)
                journal.close()
                shutil.rmtree(path.parent)
            gc.collect()
    on_disk, in_memory = (statistics.median(speeds[kind]) for kind in ("disk", "memory"))
    return {
        "tokens": length,
        "trajectories_per_s": on_disk,
        "mb_per_s": on_disk * length * TOKEN_BYTES / 1e6,
        "without_journal_per_s": in_memory,
        "journal_overhead_us": 1e6 / on_disk - 1e6 / in_memory,
        "cores_used": statistics.median(cpu),
        **disk,
    }


def _disk_use(journal: DurableJournal, trajectories: int) -> dict[str, float]:
    """Bytes that stay on disk for a trajectory that was consumed, and the largest the files have been."""
    reader = sqlite3.connect(f"file:{journal.path}?mode=ro", uri=True)
    events = reader.execute("SELECT sum(length(body)) FROM log").fetchone()[0]
    reader.close()
    peak = sum(each.stat().st_size for each in journal.path.parent.rglob("*") if each.is_file())
    return {"log_bytes_per_trajectory": events / trajectories, "files_mb": peak / 1e6}


def memory(length: int, trajectories: int) -> dict[str, Any]:
    """Memory that live trajectories take."""
    gc.collect()
    tracemalloc.start()
    driver = Driver(MemoryJournal(keep=False), length)
    ledger = StalenessLedger(trajectories // MEMBERS, 1)
    server = TrajectoryServer(ledger, MEMBERS, 0, MemoryJournal(keep=False), Payloads(driver.server.payloads.limits))  # type: ignore[union-attr]
    driver.server = server
    parts = [(end, chunk.start, chunk.tokens, chunk.logprobs) for end, chunk in driver.chunks]
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(trajectories // MEMBERS):
        group = server.admit(driver.prompts)
        assert group is not None
        for one in group.members:
            # fresh bytes for each, as they would come off a socket
            driver.chunks = [(e, Chunk(s, bytes(bytearray(t)), bytes(bytearray(p)))) for e, s, t, p in parts]
            driver.run(one.name, 0)
    driver.chunks = []
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    payload = trajectories * length * TOKEN_BYTES
    return {
        "tokens": length,
        "trajectories": trajectories,
        "bytes_per_trajectory": used / trajectories,
        "bytes_per_token": used / trajectories / length,
        "overhead_per_trajectory": (used - payload) / trajectories,
    }


def kept_steps(folder: Path, length: int, steps: int) -> dict[str, Any]:
    """What it costs to keep steps until a checkpoint holds them: CPU time against dropping them, disk and memory."""
    cpu: dict[bool, list[float]] = {False: [], True: []}
    found: dict[str, float] = {}
    trajectories = steps * GROUPS * MEMBERS
    for keeps in (False, True) * 3:
        path = folder / f"kept{length}" / "journal.db"
        journal = DurableJournal(path, lazy_s=0.25)
        driver = Driver(journal, length)
        driver.server.keeps_steps = keeps
        began = time.process_time()
        for _ in range(steps):
            driver.step()
        journal.commit()
        cpu[keeps].append((time.process_time() - began) / trajectories * 1e6)
        if keeps:
            files = sum(each.stat().st_size for each in path.with_name("journal.db-payload").iterdir())
            made = driver.server.made.values()
            found = {
                "disk_bytes_per_token": files / (trajectories * length),
                "memory_bytes_per_trajectory": sum(len(each.body) for each in made) / trajectories,
            }
            began = time.process_time()
            driver.server.forget(driver.server.ledger.version)
            found["forget_us_per_trajectory"] = (time.process_time() - began) / trajectories * 1e6
        journal.close()
        shutil.rmtree(path.parent)
    dropped, kept = (statistics.median(cpu[keeps]) for keeps in (False, True))
    return {"tokens": length, "cpu_us_dropped": dropped, "cpu_us_kept": kept, **found}


def recovery(folder: Path, events: int, snapshots: bool) -> dict[str, Any]:
    """Write this many events of short trajectories, and time the start of a new owner."""
    path = folder / f"recovery{events}{snapshots}" / "journal.db"
    journal = DurableJournal(path, snapshot_events=SNAPSHOT_EVENTS if snapshots else 10**12)
    driver = Driver(journal, 16)
    recover(driver.server, journal)
    while journal.position < events:
        driver.step()
    version, position = driver.server.ledger.version, journal.position
    journal.close()
    began = time.perf_counter()
    again = DurableJournal(path)
    server = new_server(again, 16)
    recover(server, again)
    seconds = time.perf_counter() - began
    assert (server.ledger.version, again.position) == (version, position)
    again.close()
    size = path.stat().st_size
    shutil.rmtree(path.parent)
    return {"events": position, "snapshots": snapshots, "recovery_s": seconds, "file_mb": size / 1e6}


def stores(folder: Path, total: int, commit: int) -> list[dict[str, Any]]:
    """The same bytes, synced every ``commit`` bytes: a bare file, and SQLite with pages of several sizes."""
    row = os.urandom(16_384)

    def bare() -> None:
        handle = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for _ in range(total // commit):
            os.write(handle, row * (commit // len(row)))
            os.fdatasync(handle)
        os.close(handle)

    def sqlite(page: int) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            db = sqlite3.connect(Path(inner) / "db", isolation_level=None)
            db.execute(f"PRAGMA page_size={page}")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.execute("CREATE TABLE rows(id INTEGER PRIMARY KEY, body BLOB)")
            for _ in range(total // commit):
                db.execute("BEGIN")
                db.executemany("INSERT INTO rows(body) VALUES(?)", [(row,)] * (commit // len(row)))
                db.execute("COMMIT")
            db.close()

    kinds: dict[str, Callable[[], None]] = {"bare file": bare}
    kinds |= {f"SQLite, pages of {page // 1024} KB": lambda page=page: sqlite(page) for page in (4096, 16384, 65536)}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(3):
        for kind, write in kinds.items():
            began = time.perf_counter()
            write()
            times[kind].append(time.perf_counter() - began)
    return [
        {"store": kind, "commit_kb": commit // 1024, "mb_per_s": total / statistics.median(each) / 1e6}
        for kind, each in times.items()
    ]


def table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    head = list(rows[0])
    cells = [[f"{value:,.2f}" if isinstance(value, float) else f"{value}" for value in row.values()] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(head)]
    for line in (head, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def measure(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as name:  # on a disk, where /tmp may be memory
        folder = Path(name)
        rounds, seconds = (1, 1.0) if quick else (5, 3.0)
        return {
            "lifecycle": [lifecycle(folder, length, rounds, seconds) for length in LENGTHS],
            "memory": [memory(length, count) for length, count in ((16, 32_000), (2_000, 8_000), (20_000, 1_600))],
            "kept": [kept_steps(folder, *size) for size in ((16, 40), (50, 40), (2_000, 4))],
            "recovery": [
                recovery(folder, events, snapshots)
                for events in ((10_000, 100_000) if quick else (10_000, 100_000, 1_000_000))
                for snapshots in (False, True)
            ],
            "stores": [
                row for commit in (65_536, 2**20, 2**22) for row in stores(folder, min(64 * commit, 2**26), commit)
            ],
            "weights": measure_weights(quick),
            "targets": TARGETS,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.quick)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    table("Trajectories from admission to commit", result["lifecycle"])
    table("Memory of live trajectories", result["memory"])
    table("Committed steps that are kept until a checkpoint holds them", result["kept"])
    table("Recovery", result["recovery"])
    table("The same bytes through several stores", result["stores"])
    print("\nWeights")
    print(weights_table(result["weights"]))


if __name__ == "__main__":
    main()
