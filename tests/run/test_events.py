"""A run that cannot be read back event by event cannot be explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from staleflow.config import load
from staleflow.config.presets import PAPER
from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.events import EventReader, read_commits, read_events
from staleflow.run.fleet import read_fleet
from staleflow.servers.database import DamagedError
from staleflow.servers.durable import DurableJournal
from tests.dash.recorded import cluster_of, recorded


@pytest.mark.parametrize("broken", [0, 4])
def test_a_run_that_is_recorded_is_the_same_run(tmp_path: Path, broken: int) -> None:
    _, watched = recorded(tmp_path / "run", seed=5, broken=broken)
    alone = cluster_of(5, broken)
    alone.run()
    assert watched.journal.digest() == alone.journal.digest()


@pytest.mark.parametrize("broken", [0, 4])
def test_the_record_has_every_event_in_order_and_with_its_time(tmp_path: Path, broken: int) -> None:
    directory, cluster = recorded(tmp_path / "run", seed=5, broken=broken)
    found = list(read_events(directory))
    times = [each.time for each in found]
    assert times == sorted(times)
    commits = [each for each in found if each.event[0] == "commit"]
    assert [each.event[1] for each in commits] == [0, 1, 2]
    assert [each.time for each in commits] == pytest.approx([step.time for step in cluster.recorder.steps], abs=0.1)
    assert [row["step"] for row in read_metrics(directory.metrics)] == [0, 1, 2]
    moments = list(read_fleet(directory.fleet))
    assert len(moments) > 10
    assert {each.name for each in moments[-1].instances} <= {each.name for each in cluster.rollouts}


def test_a_reader_that_continues_sees_each_event_once(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    everything = list(read_events(directory))
    place, seen = None, []
    for _ in range(10_000):
        reader = EventReader(directory, place)
        seen += reader.read(rows=1)
        place = reader.place
        if reader.behind == 0:
            break
    assert seen == everything


def test_the_admission_of_a_group_is_about_it_although_it_does_not_name_it(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    everything = list(read_events(directory))
    for prompt in (0, 3, 7):
        found = [each.event for each in read_events(directory, [f"p{prompt}"])]
        assert found[0][:3] == ("admit", prompt, 0)
        assert found[0] in [each.event for each in everything]


def test_events_about_one_trajectory_have_the_times_that_all_events_have(tmp_path: Path) -> None:
    directory = RunDirectory.at(tmp_path / "run", load(PAPER, []))
    journal = DurableJournal(directory.journal(), threaded=False)
    for second in range(40):
        journal.stamp(float(second))
        for member in range(3):
            journal.append(("route", f"p{second}/{member}", "i0", 1))
            journal.commit()  # most transactions have no time of their own
    journal.close()
    everything = list(read_events(directory))
    for name in ("p1/2", "p17/0", "p39/2"):
        assert list(read_events(directory, [name])) == [each for each in everything if each.event[1] == name]
    assert list(read_events(directory, ["p1"])) == []


def test_a_damaged_journal_is_one_line_and_not_a_traceback(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    body = directory.journal().read_bytes()
    directory.journal().write_bytes(body[:4096] + b"?" * (len(body) - 4096))
    with pytest.raises(DamagedError, match="is damaged"):
        list(read_events(directory))
    directory.journal().write_bytes(b"not a database" * 999)
    with pytest.raises(DamagedError, match="is damaged"):
        read_commits(directory)
