"""Single faults, and runs without any. Faults by the thousand are in ``tests/chaos/test_simulated.py``."""

from dataclasses import replace

import pytest

from bench.chaos_simulated import run, setting_of
from staleflow.coordinator import decide, migration, routing
from staleflow.runtime import control, fleet, situate


@pytest.mark.parametrize("first", range(3000, 3100, 50))
def test_a_version_that_is_seen_before_it_is_announced_ends_no_run(first: int) -> None:
    names = ("late_announcement", "late_announcement", "crash", "late_join", "kill_trainer_after_push", "kill_control")
    for seed in range(first, first + 50):
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
    names = ("scale", "scale", "scale", "slow_down", "slow_disk", "kill_trainer")
    cluster = run(seed, count=8, setting=lossless, names=names)
    assert not cluster.recorder.wasted
    assert len(cluster.rollouts) > lossless.instances or cluster.leaving


@pytest.mark.parametrize("first", range(6000, 6100, 50))
def test_decisions_that_are_cut_short_break_no_promise(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with thousands of instances, where one decision does not do all that there is to do."""
    for module, name, most in (
        (decide, "MOST_PULLS", 1),
        (fleet, "MOST_ROWS", 1),
        (migration, "MOST_RELIEVED", 1),
        (routing, "MOST_ROUTES", 3),
        (control, "MOST_ROUTES", 3),
        (situate, "MOST_THRASHING", 2),
    ):
        monkeypatch.setattr(module, name, most)
    for seed in range(first, first + 50):
        run(seed)
