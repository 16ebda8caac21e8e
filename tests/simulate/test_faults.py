"""Runs in which things go wrong: nothing is trained too late, twice or never, and every run ends."""

from dataclasses import replace

import pytest

from tests.simulate.random_runs import run, setting_of

CHUNK = 50
USUAL = 300
"""Seeds in every run of the tests; all of the thousand, and ten thousand more, with the slow ones."""


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= USUAL)) for first in range(0, 1000, CHUNK)]
)
def test_no_fault_breaks_a_promise(first: int) -> None:
    failed: dict[int, str] = {}
    for seed in range(first, first + CHUNK):
        try:
            run(seed)
        except Exception as error:
            failed[seed] = f"{type(error).__name__}: {error}"
    assert not failed, "rerun with python -m tests.simulate.random_runs SEED"


@pytest.mark.parametrize("first", range(3000, 3100, CHUNK))
def test_a_version_that_is_seen_before_it_is_announced_ends_no_run(first: int) -> None:
    names = ("late_announcement", "late_announcement", "crash", "late_join", "kill_trainer_after_push", "kill_control")
    for seed in range(first, first + CHUNK):
        run(seed, names=names)


@pytest.mark.parametrize("seed", [3, 9, 139, 400, 777])
def test_the_same_seed_gives_the_same_run_to_the_last_event(seed: int) -> None:
    assert run(seed).journal.digest() == run(seed).journal.digest()


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_without_faults_and_without_surplus_no_token_is_wasted(seed: int) -> None:
    setting = setting_of(seed)
    strategies = replace(setting.strategies, tail="wait")
    lossless = replace(setting, redundancy=0, extra_members=0, filter="none", strategies=strategies)
    assert not run(seed, count=0, setting=lossless).recorder.wasted


@pytest.mark.parametrize("seed", range(4000, 4060))
def test_instances_that_join_and_leave_cost_no_token(seed: int) -> None:
    """All that a leaving instance has comes back and continues elsewhere: nothing is wasted, nothing made again."""
    setting = setting_of(seed)
    strategies = replace(setting.strategies, tail="wait")
    lossless = replace(setting, redundancy=0, extra_members=0, filter="none", strategies=strategies)
    cluster = run(seed, count=8, setting=lossless, names=("scale", "scale", "scale", "bad_network"))
    assert not cluster.recorder.wasted
    assert len(cluster.rollouts) > lossless.instances or cluster.leaving


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_ten_thousand_more_runs_with_more_faults(first: int) -> None:
    for seed in range(first, first + 500):
        run(seed, count=12)
