"""A page that shows other things than happened is worse than none."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from staleflow.dash.index import Index
from staleflow.dash.replica import SETTINGS, Replica, bin_edge, length_bin
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_events
from staleflow.servers.durable import DurableJournal
from tests.dash.recorded import GROUPS, SIZE, STEPS, recorded


def read_all(index: Index) -> Index:
    while index.catch_up():
        pass
    assert not index.trouble
    return index


@pytest.fixture(scope="module", params=[0, 5], ids=["well", "with faults"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return recorded(tmp_path_factory.mktemp("run") / "run", seed=3, broken=request.param)


def test_every_trained_trajectory_is_in_the_index_with_its_step_and_versions(run, tmp_path: Path) -> None:
    directory, cluster = copied(run[0], tmp_path), run[1]
    index = read_all(Index(directory))
    rows, _ = index.trajectories(state="trained", limit=1000)
    steps = cluster.recorder.steps
    assert Counter(row.step for row in rows) == dict.fromkeys(range(STEPS), GROUPS * SIZE)
    assert {row.group for row in rows} == {name for step in steps for name in step.groups}
    assert sum(row.tokens for row in rows) == cluster.recorder.trained_tokens
    assert all(row.step - row.oldest <= 1 for row in rows)  # type: ignore[operator]
    for row in rows:
        assert row.began is not None
        assert row.generated is not None
        assert row.scored is not None
        assert row.admitted <= row.began <= row.generated <= row.scored <= row.ended
    assert index.replica is not None
    assert sum(index.replica.trained.values()) == len(rows)
    assert sum(index.replica.offered.values()) >= len(rows)
    index.close()


def test_a_page_that_is_opened_again_continues_where_it_was(run, tmp_path: Path) -> None:
    directory = copied(run[0], tmp_path)
    at_once = read_all(Index(copied(run[0], tmp_path / "other")))
    index = Index(directory)
    for rounds in range(10_000):
        more = index.catch_up()
        if rounds % 3 == 0:
            index.save()
            index.close()
            index = Index(directory)
        if not more:
            break
    index = read_all(index)
    assert index.trajectories(limit=1000) == at_once.trajectories(limit=1000)
    assert index.replica is not None
    assert at_once.replica is not None
    assert index.replica.book.ledger.to_state() == at_once.replica.book.ledger.to_state()
    assert index.replica.offered == at_once.replica.offered
    assert index.marks("i0", 0, 1e9, 1000) == at_once.marks("i0", 0, 1e9, 1000)
    for each in (index, at_once):
        each.close()


def test_a_page_that_was_killed_shows_nothing_twice(run, tmp_path: Path) -> None:
    directory = copied(run[0], tmp_path)
    first = read_all(Index(directory))
    first.save()
    with first.lock:
        first.replica.ended.append(first.trajectories(limit=1)[0][0])  # type: ignore[union-attr]
        first._flush()  # and then it died: this was written after the last save
    first._db.close()
    os.close(first._owned)
    again = read_all(Index(directory))
    names = [each.name for each in again.trajectories(limit=1000)[0]]
    assert len(names) == len(set(names))
    again.close()


def test_pages_of_trajectories_have_each_of_them_once(run, tmp_path: Path) -> None:
    index = read_all(Index(copied(run[0], tmp_path)))
    everything = [each.name for each in index.trajectories(limit=1000)[0]]
    before, seen = 0, list[str]()
    while True:
        rows, before = index.trajectories(before=before, limit=7)
        seen += [each.name for each in rows]
        if not before:
            break
    assert seen == everything
    group = everything[0].rpartition("/")[0]
    found, _ = index.trajectories(name=f"{group}/")
    assert {each.group for each in found} == {group}
    index.close()


def test_two_pages_of_one_run_do_not_disturb_each_other(run, tmp_path: Path) -> None:
    directory = copied(run[0], tmp_path)
    one, two = Index(directory), Index(directory)
    more = True
    while more:
        more = one.catch_up() | two.catch_up()
    assert one.trajectories(limit=1000) == two.trajectories(limit=1000)
    assert one.count() == len({each.name for each in one.trajectories(limit=1000)[0]})
    for each in (two, one):
        each.close()


def test_a_journal_that_cannot_be_replayed_is_said_so_and_not_shown(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    journal = DurableJournal(directory.journal(), threaded=False)
    journal.append(("score", "p999/0", 1.0))
    journal.close()
    index = Index(directory)
    while index.catch_up():
        pass
    assert "cannot be followed" in index.trouble
    index.close()


def test_the_buffers_are_those_of_the_ledger_at_every_moment(tmp_path: Path) -> None:
    directory, cluster = recorded(tmp_path / "run", seed=4)
    setting = cluster.setting
    sizes = setting.groups, setting.staleness, setting.redundancy, setting.group_size, setting.extra_members
    replica = Replica(dict(zip(SETTINGS, sizes, strict=True)))
    ready = 0
    for each in read_events(directory):
        replica.follow([each], 0, 0)
        view = replica.book.ledger.view()
        assert all(len(step.groups) <= GROUPS for step in view)
        assert {name for step in view for name in step.groups} <= set(replica.book.groups)
        ready += view[0].state == "ready"
    assert ready > 0
    assert replica.book.ledger.version == STEPS


def test_bins_of_lengths_have_no_gaps() -> None:
    for tokens in range(1, 5000):
        assert bin_edge(length_bin(tokens)) <= tokens + 1
        assert length_bin(tokens + 1) >= length_bin(tokens)


def copied(directory: RunDirectory, to: Path) -> RunDirectory:
    shutil.copytree(directory.path, to / "copy", ignore=shutil.ignore_patterns("index.db*"))
    return RunDirectory(to / "copy")
