"""Synchronisation: no idle fleet, no pull that does not pay, and the predicted gain by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.situation import Pace, Pull, Situation
from staleflow.coordinator.strategies import SYNCHRONISATION, Strategies
from staleflow.protocol import StalenessLedger
from tests.coordinator.make_situations import (
    FLAT,
    clone,
    decided,
    fresh,
    instance,
    random_situations,
    same,
    situation,
    started,
)

GAIN = Strategies(synchronisation="gain", horizon=0.1, mu=0.0)
Random = tuple[Situation, StalenessLedger]
PACE = Pace(step_s=100.0)
"""With the above, a horizon of 10 s."""


def pulled(one: Situation, strategies: Strategies) -> list[str]:
    pulls = decided(SYNCHRONISATION, one, strategies)
    assert all(pull.version == one.newest for pull in pulls)
    return [pull.instance for pull in pulls]


@pytest.mark.parametrize("mode", SYNCHRONISATION.entries)
@pytest.mark.parametrize("horizon", [0.0, 0.004, 0.1])
def test_deadlock_an_idle_instance_with_nothing_admissible_always_pulls(mode: str, horizon: float) -> None:
    """Room at the newest version only, the whole fleet empty and behind: nothing would ever happen again."""
    strategies = Strategies(synchronisation=mode, horizon=horizon)  # type: ignore[arg-type]
    views = [instance("a", 0), instance("b", 1)]
    for queue in (fresh("f", 500), started("g", 2, 500), []):
        one = situation(views, queue, {0: 0, 1: 0, 2: 3}, newest=2, pull_s=50.0, pace=PACE)
        assert pulled(one, strategies) == ["a", "b"]


@pytest.mark.parametrize("mode", ["starved", "gain"])
def test_an_idle_instance_with_work_at_its_version_does_not_lose_it_to_a_pull(mode: str) -> None:
    strategies = Strategies(synchronisation=mode)  # type: ignore[arg-type]
    for queue, room in ((started("g", 0, 500), {1: 0}), (fresh("f", 500), {0: 1, 1: 1})):
        assert pulled(situation([instance("a", 0)], queue, room, newest=1, pace=PACE), strategies) == []


def test_greedy_pulls_everything_that_is_behind_and_nothing_else() -> None:
    views = [
        instance("behind", 0, running=3, context=9),
        instance("newest", 1),
        instance("dead", 0, alive=False),
        instance("pulling", 0, pulling=True),
    ]
    assert decided(SYNCHRONISATION, situation(views), Strategies(synchronisation="greedy")) == [Pull("behind", 1)]


def test_starved_leaves_what_runs_alone() -> None:
    views = [instance("runs", 0, running=1), instance("thrashes", 0, waiting=1), instance("idle", 0)]
    one = situation(views, fresh("f", 500), {1: 9}, newest=1)
    assert pulled(one, Strategies(synchronisation="starved")) == ["idle"]


@pytest.mark.parametrize(("pull_s", "expected"), [(0.9, ["a"]), (1.9, [])])
def test_the_gain_by_hand(pull_s: float, expected: list[str]) -> None:
    """Four run, with 10,000 tokens; one more waits. Stay: 400 tokens/s for 10 s = 4,000 tokens. Pull, 0.9 s and 1 s
    of prefill: 500 tokens/s for 8.1 s = 4,050. With 1.9 s for the pull: 7.1 s * 500 = 3,550."""
    busy = instance("a", 0, running=4, context=10_000)
    one = situation([busy], fresh("f", 500), {1: 1}, newest=1, cost=FLAT, pull_s=pull_s, pace=PACE)
    assert pulled(one, GAIN) == expected


def test_no_pull_for_work_that_the_present_version_can_take() -> None:
    busy = instance("a", 1, running=1, context=100)
    queue, room = started("old", 0, 500), {1: 0, 2: 5}
    one = situation([busy], queue, room, newest=2, cost=FLAT, pace=PACE)
    assert pulled(one, GAIN) == [], "the queue is admissible already"
    assert pulled(replace(one, queue=started("young", 2, 500)), GAIN) == ["a"]
    assert pulled(replace(one, queue=fresh("f", 500)), GAIN) == ["a"]
    assert pulled(replace(one, queue=fresh("f", 500), room={1: 1, 2: 5}), GAIN) == []
    assert pulled(replace(one, queue=fresh("f", 500), room={1: 0, 2: 0}), GAIN) == []


def test_no_pull_for_work_that_would_not_fit() -> None:
    busy = instance("a", 0, running=1, context=100, kv_free=600)
    one = situation([busy], fresh("f", 500), {1: 5}, newest=1, cost=FLAT, pace=PACE)
    assert pulled(one, GAIN) == []


def test_no_pull_for_work_that_instances_with_the_newest_version_will_share() -> None:
    busy, idle = instance("a", 0, running=4, context=100), [instance(f"i{row}", 1) for row in range(15)]
    one = situation([busy, *idle], fresh("f", *[500] * 4), {1: 2}, cost=FLAT, pace=PACE)
    assert pulled(one, GAIN) == [], "a quarter of a trajectory does not pay for a pull of 1 s in 10"
    full = [replace(view, kv_free=0) for view in idle]
    assert pulled(replace(one, fleet=situation([busy, *full]).fleet), GAIN) == ["a"]


def test_no_pull_for_work_that_routing_would_not_give_it() -> None:
    busy = instance("a", 0, running=60, context=120_000, kv_free=10**7)
    one = situation([busy], fresh("f", *[500] * 100), {1: 50}, newest=1, pace=Pace(step_s=10_000.0))
    assert pulled(one, Strategies(synchronisation="gain", mu=0.3)) == []
    assert pulled(one, Strategies(synchronisation="gain", routing="least_loaded")) == ["a"]


def test_concentration_all_that_gain_pull_together() -> None:
    views = [instance(f"i{row}", 0, running=4, context=100) for row in range(4)]
    work = fresh("f", *[500] * 16)
    one = situation(views, work, {1: 8}, newest=1, cost=FLAT, pace=PACE)
    assert pulled(one, GAIN) == ["i0", "i1", "i2", "i3"], "four more for each"


def test_a_little_work_is_not_spread_so_thin_that_nobody_pulls_for_it() -> None:
    views = [instance(f"i{row}", 0, running=4 + row, context=100) for row in range(64)]
    one = situation(views, fresh("f", *[500] * 4), {1: 2}, newest=1, cost=FLAT, pace=PACE)
    assert pulled(one, GAIN) == ["i0", "i1", "i2", "i3"], "one for each, where pulling costs least"


def test_the_unknown_pace_of_a_new_run_stops_no_pull() -> None:
    busy = instance("a", 0, running=1, context=100)
    one = situation([busy], fresh("f", 500, 500), {1: 5}, newest=1, cost=FLAT)
    for pull_s in (0.0, 0.5):
        assert pulled(replace(one, pull_s=pull_s), GAIN) == ["a"]


@given(case=random_situations(), mode=st.sampled_from(sorted(SYNCHRONISATION.entries)))
def test_only_what_is_behind_pulls_and_starved_pulls_least(case: Random, mode: str) -> None:
    one, _ = case
    before = clone(one)
    names = pulled(one, Strategies(synchronisation=mode))  # type: ignore[arg-type]
    assert same(one, before)
    assert names == pulled(one, Strategies(synchronisation=mode))  # type: ignore[arg-type]
    assert set(pulled(one, Strategies(synchronisation="starved"))) <= set(names)
    assert set(names) <= set(pulled(one, Strategies(synchronisation="greedy")))
    for name in names:
        row = one.fleet.names.index(name)
        assert one.fleet.alive[row]
        assert not one.fleet.pulling[row]
        assert one.fleet.version[row] < one.newest
