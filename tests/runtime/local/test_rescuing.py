"""A run that has failed is saved, whatever goes on failing meanwhile."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from staleflow.runtime.local.crew import Crew
from staleflow.runtime.local.hearing import MOST_FAILURES, Hearing
from staleflow.runtime.local.playing import Playing
from staleflow.runtime.local.rescuing import STOPPED_S, Interrupted, Rescue
from staleflow.runtime.local.watching import Watching
from staleflow.types import Moved


def test_a_reward_that_goes_on_failing_does_not_end_the_rescue_of_the_run(tmp_path: Path) -> None:
    failures: list[str] = []
    run: Any = SimpleNamespace(
        loop=SimpleNamespace(time=lambda: 0.0),
        control=SimpleNamespace(over=False, on_score_failed=lambda *_: None),
        kept=SimpleNamespace(counted=lambda *_: None),
        incidents=SimpleNamespace(rarely=lambda *_: None),
        pool=SimpleNamespace(away_s=0.0),
        config=SimpleNamespace(reward=SimpleNamespace(patience_s=300.0)),
        directory=SimpleNamespace(log=lambda name: tmp_path / name),
        crew=SimpleNamespace(fail=failures.append),
    )
    run.rescue = Rescue(run)
    hearing = Hearing(run)
    for _ in range(MOST_FAILURES):
        hearing.reward_failed("p0/0", "MemoryError")
    assert len(failures) == 1
    run.rescue.begun = True
    hearing.reward_failed("p0/1", "MemoryError")
    assert len(failures) == 1


def test_an_evaluation_that_waits_for_a_service_says_so_now_and_then() -> None:
    told: list[tuple[str, str]] = []
    incidents = SimpleNamespace(rarely=lambda kind, text, _now: told.append((kind, text)))
    run: Any = SimpleNamespace(loop=SimpleNamespace(time=lambda: 0.0), incidents=incidents)
    for message in (Moved(), Moved(why="connection refused")):
        Hearing(run).evaluator(MagicMock(), message)
    assert told == [("evaluator", "the evaluation waits: connection refused")]


def test_a_run_that_is_stopped_on_a_full_disk_does_not_wait_for_room_for_ever() -> None:
    said: list[str] = []
    failures: list[Exception] = []
    run: Any = SimpleNamespace(
        training=True,
        interrupted=False,
        stopped_by="Ctrl-C",
        journal=SimpleNamespace(trouble="disk is full"),
        incidents=SimpleNamespace(note=said.append),
        crew=SimpleNamespace(fail=failures.append),
    )
    rescue = Rescue(run)
    rescue.look(0.0)
    rescue.look(2 * STOPPED_S)
    assert not said, "nobody has asked it to stop: it waits for room"
    run.interrupted = True
    rescue.look(100.0)
    run.journal.trouble = ""
    rescue.look(110.0)
    run.journal.trouble = "disk is full"
    rescue.look(120.0)
    rescue.look(119.0 + STOPPED_S)
    assert len(said) == 2
    assert not failures
    rescue.look(121.0 + STOPPED_S)
    assert isinstance(failures[0], Interrupted)
    assert str(failures[0]) == "stopped by Ctrl-C without room on the disk: disk is full"


def test_whoever_watches_a_run_looks_whether_one_that_is_stopped_waits_for_room() -> None:
    run = MagicMock()
    run.watchdog.interval_s = 0.0
    run.journal.trouble = run.steps.trouble = ""
    run.loop.time.return_value = 7.0
    run.crew.look.side_effect = [[], asyncio.CancelledError]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Watching(run).keep_watching())
    run.rescue.look.assert_called_once_with(7.0)


def test_on_a_full_disk_no_checkpoint_is_tried_for_who_wants_the_run_to_end(tmp_path: Path) -> None:
    run = MagicMock(interrupted=True)
    run.journal.trouble = "disk is full"
    run.directory.path = run.directory.checkpoints = tmp_path
    run.directory.checkpoint.return_value = tmp_path / "none"
    run.server.ledger.version = run.server.ledger.frontier = 3
    said = asyncio.run(Rescue(run).rescued())
    assert said.startswith("what could not be written is made again; continue from the journal")
    assert not run.crew.only.called


def test_what_is_wrong_with_an_answer_ends_the_run_instead_of_leaving_its_group_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their filter raises: whoever heard the answer of an environment, or of a reward worker, only logged it."""
    failures: list[Exception] = []
    run, heard = MagicMock(), list[Any]()
    crew: Any = SimpleNamespace(fail=failures.append)
    run.crew.fatal = lambda hear: Crew.fatal(crew, hear)
    run.directory.log.return_value = tmp_path / "log"
    wrong = run.control.episodes.outcome.side_effect = run.control.episodes.lost.side_effect = ValueError("a filter")
    monkeypatch.setattr("staleflow.runtime.local.playing.EnvironmentPool", lambda *given: heard.extend(given[2:4]))
    monkeypatch.setattr("staleflow.runtime.local.playing.opened", lambda *_: None)
    Playing(run)
    ended, lost = heard
    ended("p0/0", 1, None)
    lost("p0/0", 1)
    assert failures == [wrong, wrong]
