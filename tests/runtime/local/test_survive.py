"""Processes that hang, die or cannot be written for: the run says so, continues, and whatever ends it leaves a
checkpoint that resumes."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from staleflow.observe.metrics import MetricsLog, read_metrics
from staleflow.run.checkpoints import newest, wrong_with
from staleflow.run.directory import RunDirectory
from staleflow.runtime import watchdog
from staleflow.runtime.local.evaluations import Evaluations
from staleflow.runtime.local.run import LocalRun, RunError
from staleflow.runtime.local.saving import Saving
from tests.runtime.local.test_run import configured, model, run_once

__all__ = ["model"]
pytestmark = pytest.mark.processes


def signalled(run: LocalRun, name: str, number: signal.Signals) -> None:
    os.kill(run.crew.children[name].pid, number)


def test_hung_processes_are_named_and_replaced_a_full_disk_is_waited_for_and_no_evaluation_is_lost(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped trainer was never noticed; an evaluator that died in the last evaluation ended the run; so did a line
    of metrics that could not be written."""
    monkeypatch.setattr(watchdog, "LOST", 3.0)
    config = configured(model, tmp_path, "steps=8", "staleness=1", "processes.hung_s=5")
    stopped: list[str] = []
    full = [2]
    asked: list[int] = []
    runs: list[LocalRun] = []
    write, ask = MetricsLog.write, Evaluations.ask

    def watch(run: LocalRun) -> None:
        runs[:] = [run]
        for name, version in (("trainer", 2), ("i0", 4)):
            if run.training and name not in stopped and run.server.ledger.version >= version:
                stopped.append(name)
                signalled(run, name, signal.SIGSTOP)

    def no_room(log: MetricsLog, row: Any) -> None:
        if row["step"] == 6 and full[0]:
            full[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write(log, row)

    def kills_the_evaluator(evaluations: Evaluations, version: int, now: bool = True) -> None:
        asked.append(version)
        if version == 8:
            signalled(runs[0], "evaluator", signal.SIGKILL)
        ask(evaluations, version, now)

    monkeypatch.setattr(MetricsLog, "write", no_room)
    monkeypatch.setattr(Evaluations, "ask", kills_the_evaluator)
    notes: list[str] = []
    summary, directory = run_once(config, model, watch=watch, tell=notes.append)
    assert stopped == ["trainer", "i0"]
    for what in ("trainer has not moved", "trainer stood still", "i0 has not moved", "i0 stood still", "paused: "):
        assert any(note.startswith(what) for note in notes), (what, notes)
    assert "evaluator died: killed (SIGKILL; out of memory?); started again" in notes
    assert summary["restarts"]["trainer"]["stood still"] == summary["restarts"]["instance"]["stood still"] == 1
    assert summary["restarts"]["evaluator"] == {"killed (SIGKILL; out of memory?)": 1}
    assert summary["failures"]["disk"] == {"not written": 1}
    assert [row["step"] for row in read_metrics(directory.metrics)] == list(range(8))
    assert asked == [0, 8]
    assert [each["step"] for each in summary["accuracy"]] == [0, 8]
    assert summary["groups_committed"] == 8 * config.groups


@pytest.mark.slow
def test_a_trainer_that_dies_too_often_leaves_a_checkpoint_and_so_does_sigterm_in_an_evaluation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message named --resume, and there was nothing to resume from."""
    config = configured(model, tmp_path, "steps=9", "staleness=1")
    made: list[int] = []

    def kill(run: LocalRun) -> None:
        run.crew.restarts.most = 0
        if run.training and run.server.ledger.version >= 3 and not made:
            made.append(run.server.ledger.version)
            signalled(run, "trainer", signal.SIGKILL)

    with pytest.raises(RunError, match=r"trainer died 1 times .* continue from step-0+(\d+) with: .*--resume"):
        run_once(config, model, watch=kill)
    directory = RunDirectory((tmp_path / "latest").resolve())
    latest = newest(directory.checkpoints)
    assert latest is not None
    assert wrong_with(latest) == ""
    assert int(latest.name.removeprefix("step-")) >= made[0]

    ask = Evaluations.ask

    def hangs_up(evaluations: Evaluations, version: int, now: bool = True) -> None:
        ask(evaluations, version, now)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Evaluations, "ask", hangs_up)
    summary, _ = run_once(config, model, directory)
    assert (summary["steps"], summary["lives"]) == (int(latest.name.removeprefix("step-")), 2)
    latest = newest(directory.checkpoints)
    assert latest is not None
    assert wrong_with(latest) == ""


def test_a_run_that_cannot_start_says_only_why(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=2")

    def kill(run: LocalRun) -> None:
        run.crew.restarts.most = 0
        if "i0" in run.crew.children:
            signalled(run, "i0", signal.SIGKILL)

    with pytest.raises(RunError, match=r"^i0 died 1 times in 10 minutes, last killed \(SIGKILL; out of memory\?\)"):
        run_once(config, model, watch=kill)
    assert newest(RunDirectory((tmp_path / "latest").resolve()).checkpoints) is None


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """The trainer cannot continue: another one is started just to save."""
    changes = ["training.advantage=dr_grpo", "reward.function=tests.runtime.local.rewards:enormous"]
    config = configured(model, tmp_path, "steps=3", *changes)
    with pytest.raises(RunError, match=r"not finite.* continue from step-000000 with: .*--resume"):
        run_once(config, model)
    latest = newest(RunDirectory((tmp_path / "latest").resolve()).checkpoints)
    assert latest is not None
    assert wrong_with(latest) == ""


@pytest.mark.slow
def test_sigterm_while_the_last_checkpoint_is_written_ends_the_run_with_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the default action of the signal: no checkpoint, no summary."""
    ask = Saving.ask

    def stops(saving: Saving, version: int) -> Any:
        asked = ask(saving, version)
        os.kill(os.getpid(), signal.SIGTERM)
        return asked

    monkeypatch.setattr(Saving, "ask", stops)
    summary, directory = run_once(configured(model, tmp_path, "steps=3"), model)
    assert summary["steps"] == 3
    assert [each["step"] for each in summary["accuracy"]] == [0], "nobody waits for the last evaluation then"
    assert newest(directory.checkpoints) == directory.checkpoint(3)
    assert wrong_with(directory.checkpoint(3)) == ""
