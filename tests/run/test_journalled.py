"""The record of a run comes back from the journal as the server does: as it was after the last durable event."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from staleflow.run.journalled import JournalledRecord, report_of
from staleflow.run.record import Record
from staleflow.run.step_log import StepLog
from staleflow.servers.durable import DurableJournal
from staleflow.servers.journal import Event
from staleflow.servers.state import recover
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Chunk, Trained
from tests.servers.random_server import RandomActs, image, new_server
from tests.servers.test_durable import copied


class Pictured(DurableJournal):
    """Remembers what server and record looked like after each event."""

    def __init__(self, path: Path, snapshot_events: int = 10**9) -> None:
        super().__init__(path, threaded=False, snapshot_events=snapshot_events)
        self.servers: dict[int, str] = {}
        self.records: dict[int, bytes] = {}
        self.opened: tuple[TrajectoryServer, JournalledRecord] | None = None

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        assert self.opened is not None
        self.records[self.position] = self.opened[1].record.to_bytes()
        super().append(event, kept, dropped)
        self.servers[self.position] = image(self.opened[0])


def opened(journal: DurableJournal) -> tuple[TrajectoryServer, JournalledRecord]:
    server = new_server(journal)
    kept = JournalledRecord(Record(1), server.note)
    server.beside = lambda: kept.record.to_bytes()
    server.on_aborted = kept.aborted
    recover(server, journal, kept.restore, kept.hear)
    return server, kept


class Acts(RandomActs):
    def __init__(self, server: TrajectoryServer, kept: JournalledRecord, random: Random) -> None:
        super().__init__(server, random)
        self.kept = kept
        self._acts += (self.evaluate, self.count)

    def train(self) -> None:
        """A trainer reports before it pushes."""
        ledger, number = self.server.ledger, self.random.random
        if ledger.frontier > ledger.version:
            ages = {self.random.randrange(3): 1 + self.random.randrange(50)}
            self.kept.trained(Trained(ledger.version, {"reward": number()}, ages, ages, number(), 0.0), number(), {})
        super().train()

    def evaluate(self) -> None:
        value = self.random.random()
        self.kept.evaluated(self.server.ledger.version, value, {"reward": value}, self.random.random() < 0.9)

    def count(self) -> None:
        table, why = self.random.choice(("restarts", "failures")), self.random.choice(("full", "killed"))
        self.kept.counted(table, "disk", why)


@pytest.mark.parametrize("snapshot_events", [10**9, 40], ids=["no snapshots", "many snapshots"])
@pytest.mark.parametrize("seed", range(4))
def test_a_crash_at_any_moment_leaves_server_and_record_after_the_last_durable_event(
    tmp_path: Path, seed: int, snapshot_events: int
) -> None:
    random = Random(seed)
    journal = Pictured(tmp_path / "a" / "events.db", snapshot_events)
    journal.opened = server, kept = opened(journal)
    server.on_committed = lambda step, _: kept.committed(step, 0.0) and None
    acts = Acts(server, kept, random)
    for at in range(700):
        acts.act()
        if random.random() < 0.15:
            journal.commit()
        if at % 100 == 99:
            journal.records[journal.position] = kept.record.to_bytes()
            again = DurableJournal(copied(journal.path, tmp_path / f"b{at}"), threaded=False)
            found, record = opened(again)
            assert image(found) == journal.servers[again.durable]
            assert record.record.to_bytes() == journal.records[again.durable]
            again.close()
    assert len(kept.record.rewards) == kept.record.version > 3
    assert kept.record.tokens_wasted > 0


def test_time_that_was_spent_comes_back_and_all_of_the_record_if_it_was_told_in_the_end() -> None:
    told: list[Event] = []
    kept, again = (JournalledRecord(Record(1), lambda *event: told.append(event)) for _ in range(2))
    kept.trained(Trained(0, {"reward": 1.0}, {0: 5}, {0: 1}, 2.0, 1.0), 7.5, {"control_s": 0.25})
    told.append(("commit", 0))
    for event in told:
        again.hear(event)
    assert (again.record.control_s, again.record.seconds, again.record.rewards) == (0.25, 7.5, [1.0])
    kept.record.cpu_s["trainer"] = 3.0
    kept.tell()
    again.hear(told[-1])
    assert again.record == kept.record


def test_a_report_can_be_read_back_from_its_line_of_metrics(tmp_path: Path) -> None:
    report = Trained(3, {"reward": 0.5, "loss": -0.25, "tokens": 7}, {0: 5, 1: 2}, {1: 2}, 1.5, 0.5)
    log = StepLog(tmp_path / "metrics.jsonl")
    for step in (2, 3):
        log.add(Trained(step, *_rest(report)), [], 9.0, 1.0)
    row = log.rewind(3)
    assert row is not None
    assert report_of(row) == report
    assert log.rewind(3) is None, "the line is gone"
    told: list[Event] = []
    again, third = (JournalledRecord(Record(1), lambda *event: told.append(event)) for _ in range(2))
    again.recall(row)
    assert again.committed(3, seconds=99.0) == report
    assert again.record.made_at[4] == 9.0
    for event in (*told, ("commit", 3)):
        third.hear(event)
    assert third.record == again.record, "also after another crash"


def _rest(report: Trained) -> tuple[dict[str, float], dict[int, int], dict[int, int], float, float]:
    return report.facts, report.token_staleness, report.trajectory_staleness, report.busy_s, report.idle_s
