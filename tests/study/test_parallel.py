"""Runs in several processes: nothing twice, nothing lost, nothing left behind."""

import os
import pickle
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from staleflow.errors import ConfigError
from staleflow.protocol.ledger import LedgerError
from staleflow.runtime.control import StalledError
from staleflow.simulate.clock import DeadlockError
from staleflow.study.parallel import ONE_THREAD, Row, Run, Runner, Unit

pytestmark = pytest.mark.processes


def seen(number: int) -> Row:
    return {"number": number, "pid": os.getpid(), "threads": [os.environ.get(name) for name in ONE_THREAD]}


def refused() -> Row:
    raise ConfigError("no")


def slow(seconds: float) -> Row:
    time.sleep(seconds)
    return {}


def numbered(number: int) -> Run:
    return Run(str(number), f"run {number}", seen, (number,))


def chain(runs: dict[str, Row], *stages: list[int]) -> Unit[list[int]]:
    for stage in stages:
        yield [numbered(number) for number in stage]
    return [runs[str(number)]["number"] for stage in stages for number in stage]


@pytest.mark.parametrize("jobs", [1, 2])
def test_units_share_runs_and_get_their_results_in_order(jobs: int) -> None:
    runs: dict[str, Row] = {"9": {"number": 9}}
    started: list[str] = []
    with Runner(runs, jobs, started.append) as runner:
        found = runner.finish([chain(runs, [1, 2], [3]), chain(runs), chain(runs, [9], [2, 4]), chain(runs, [3])])
    assert found == [[1, 2, 3], [], [9, 2, 4], [3]]
    assert sorted(started) == [f"run {number}" for number in (1, 2, 3, 4)]
    assert all((runs[each]["pid"] == os.getpid()) == (jobs == 1) for each in "1234")
    if jobs > 1:
        assert runs["1"]["threads"] == ["1"] * len(ONE_THREAD), "processes times threads would be too many"


def test_one_process_finishes_one_unit_after_the_other() -> None:
    runs: dict[str, Row] = {}
    started: list[str] = []
    Runner(runs, on_run=started.append).finish([chain(runs, [1], [2]), chain(runs, [3], [4])])
    assert started == [f"run {number}" for number in (1, 2, 3, 4)]


def test_what_cannot_be_is_refused_before_anything_runs() -> None:
    def impossible() -> Unit[None]:
        raise ConfigError("no")
        yield []

    runs: dict[str, Row] = {}
    with pytest.raises(ConfigError):
        Runner(runs).finish([chain(runs, [1]), impossible()])
    assert runs == {}


@pytest.mark.parametrize("kind", [ConfigError, LedgerError, StalledError, DeadlockError])
def test_an_error_survives_the_way_between_processes(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("what is wrong")))
    assert type(error) is kind
    assert str(error) == "what is wrong"


def test_an_error_in_a_process_arrives_as_itself() -> None:
    def wrong() -> Unit[None]:
        yield [Run("wrong", "wrong", refused, ())]

    with pytest.raises(ConfigError, match="no"), Runner({}, jobs=2) as runner:
        runner.finish([wrong()])


def test_a_process_that_is_killed_is_not_waited_for() -> None:
    def dies() -> Unit[None]:
        yield [Run("dies", "dies", os._exit, (1,))]

    with pytest.raises(BrokenProcessPool), Runner({}, jobs=2) as runner:
        runner.finish([dies()])


@pytest.mark.parametrize("reason", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_ends_at_once_and_the_end_of_time_keeps_what_is_under_way(reason: type[BaseException]) -> None:
    at_once = reason is KeyboardInterrupt

    def unit() -> Unit[None]:
        yield [
            Run("quick", "quick", seen, (1,), size=2),
            Run("under way", "", slow, (60 if at_once else 1,), size=1),
            Run("last", "last", seen, (2,)),
        ]

    def tell(what: str) -> None:
        if what == "last":
            raise reason

    runs: dict[str, Row] = {}
    began = time.monotonic()
    with pytest.raises(reason), Runner(runs, 2, tell) as runner:
        runner.finish([unit()])
    assert list(runs) == (["quick"] if at_once else ["quick", "under way"])
    assert time.monotonic() - began < 40
