"""A run that stands still is noticed; one that moves, or waits for somebody with a limit of their own, is not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from staleflow.runtime.local.watching import QUIET_S, STALL_S, Watching


def run_of(folder: Path, interval_s: float, said: list[str], failures: list[Exception]) -> Any:
    watch = SimpleNamespace(waits_for=lambda: "p0", stalled=lambda: "p0")
    return SimpleNamespace(
        training=True,
        directory=SimpleNamespace(fleet=folder / "fleet"),
        instances={"i0": SimpleNamespace(tokens=5)},
        crew=SimpleNamespace(incarnations={"i0": 1}, fail=failures.append),
        server=SimpleNamespace(ledger=SimpleNamespace(version=1)),
        hearing=SimpleNamespace(scored=0),
        record=SimpleNamespace(tokens_wasted=0),
        pool=SimpleNamespace(pending=0),
        watchdog=SimpleNamespace(busy=lambda _: False, interval_s=interval_s),
        control=SimpleNamespace(watch=watch),
        incidents=SimpleNamespace(note=said.append, rarely=lambda _kind, line, _now: said.append(line)),
    )


def test_a_run_that_was_stopped_for_an_hour_and_continued_does_not_end_for_it(tmp_path: Path) -> None:
    said: list[str] = []
    failures: list[Exception] = []
    watching = Watching(run_of(tmp_path, 1.0, said, failures))
    watching.moves(10.0)
    watching.moves(11.0)
    watching.moves(11.0 + 2 * STALL_S)
    assert not said
    assert not failures


def test_time_counts_from_the_last_move_and_not_while_somebody_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    failures: list[Exception] = []
    run = run_of(tmp_path, STALL_S, said, failures)
    port, pool = run.instances["i0"], run.pool
    watching = Watching(run)
    watching.moves(10.0)
    watching.moves(10.0 + QUIET_S - 1)
    assert not said
    watching.moves(10.0 + QUIET_S)
    assert said == ["nothing has moved for 15 s; waits for p0"]
    port.tokens += 1
    watching.moves(40.0)
    pool.pending = 1
    watching.moves(40.0 + STALL_S)
    pool.pending = 0
    watching.moves(41.0 + STALL_S)
    assert len(said) == 1
    assert not failures
    watching.moves(40.0 + 2 * STALL_S)
    assert len(failures) == 1
