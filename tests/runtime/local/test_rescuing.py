"""A run that has failed is saved, whatever goes on failing meanwhile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from staleflow.runtime.local.hearing import MOST_FAILURES, Hearing
from staleflow.runtime.local.rescuing import Rescue


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
