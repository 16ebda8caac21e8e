"""A run that has failed is saved, whatever goes on failing meanwhile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from staleflow.runtime.local.hearing import MOST_FAILURES, Hearing
from staleflow.runtime.local.rescuing import STOPPED_S, Interrupted, Rescue


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
