"""Migration: relief and shorter tails, without breaking the bound or moving for nothing."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.migration import MOST_MOVES
from staleflow.coordinator.routing import most_routes
from staleflow.coordinator.situation import Interrupt, Pace, Resident, Situation
from staleflow.coordinator.strategies import MIGRATION, Strategies
from staleflow.protocol import StalenessLedger
from tests.coordinator.make_situations import clone, decided, instance, random_situations, same, situation

PACE = Pace(step_s=20.0, mean_tokens=1_000.0)
ON = Strategies(migration="gain")
CROWDED = instance("crowded", 1, running=100, context=400_000)
THRASHING = instance("thrashing", 1, running=30, waiting=2, kv_free=0)


def resident(name: str, version: int = 1, context: int = 2_000, generated: int = 1_500, moves: int = 0) -> Resident:
    return Resident(name, f"group of {name}", 0, context, generated, version, moves)


def tail(*others: object, blockers: list[Resident] | None = None) -> Situation:
    views = [CROWDED, *others]
    blockers = [resident("b")] if blockers is None else blockers
    return situation(views, pace=PACE, blockers=blockers, blocked_since=80.0)  # type: ignore[arg-type]


def thrash(*others: object) -> Situation:
    views = [THRASHING, *others]
    waiting = [resident("late"), resident("early"), resident("runs")]
    return situation(views, thrashing=waiting)  # type: ignore[arg-type]


def test_a_thrashing_instance_gives_back_what_waits_inside_and_no_more() -> None:
    moved = decided(MIGRATION, thrash(instance("free")), ON)
    assert moved == [Interrupt(name, "thrashing", "thrashing") for name in ("late", "early")]


def test_nothing_is_taken_away_that_no_other_instance_has_the_memory_for() -> None:
    assert decided(MIGRATION, thrash(), ON) == []
    assert decided(MIGRATION, thrash(instance("full", kv_free=2_000)), ON) == []
    assert len(decided(MIGRATION, thrash(instance("room for one", kv_free=4_000)), ON)) == 1


@pytest.mark.parametrize(
    "target",
    [
        instance("lagging", 0),
        instance("dead", alive=False),
        instance("thrashes too", waiting=1),
        instance("no slot", running=8, max_running=8),
    ],
)
def test_migration_to_a_lagging_instance_would_break_the_bound(target: object) -> None:
    assert decided(MIGRATION, thrash(target), ON) == []
    assert decided(MIGRATION, tail(target), ON) == []


def test_a_blocker_moves_to_an_instance_that_ends_it_sooner() -> None:
    assert decided(MIGRATION, tail(instance("idle")), ON) == [Interrupt("b", "crowded", "tail")]


def test_a_blocker_stays_where_moving_would_not_pay() -> None:
    assert decided(MIGRATION, tail(instance("as crowded", running=99, context=390_000)), ON) == []
    nearly_done = [resident("long", context=90_000, generated=300)]
    one = replace(tail(instance("idle"), blockers=nearly_done), pace=replace(PACE, mean_tokens=300.0))
    assert decided(MIGRATION, one, ON) == [], "the prefill of its context takes longer than its last tokens"
    assert decided(MIGRATION, tail(), ON) == [], "its own instance is the best"


def test_a_blocker_does_not_wait_for_the_pull_of_its_target() -> None:
    one = tail(instance("pulling", pulling=True))
    assert len(decided(MIGRATION, one, ON)) == 1
    assert decided(MIGRATION, replace(one, pull_s=1_000.0), ON) == []


def test_patience_before_a_tail_is_shortened() -> None:
    one = tail(instance("idle"))
    assert decided(MIGRATION, replace(one, blocked_since=91.0), ON) == []
    assert decided(MIGRATION, replace(one, blocked_since=None), ON) == []
    assert decided(MIGRATION, replace(one, pace=Pace()), ON) == [], "the time between two versions is unknown"


def test_hysteresis_what_has_moved_often_stays() -> None:
    assert decided(MIGRATION, tail(instance("idle"), blockers=[resident("b", moves=2)]), ON) == []
    one = thrash(instance("free"))
    assert decided(MIGRATION, replace(one, thrashing=[resident("late", moves=2)]), ON) == []


def test_never_a_whole_replica() -> None:
    blockers = [resident(f"b{at}", generated=at) for at in range(50)]
    moved = decided(MIGRATION, tail(*[instance(f"idle{at}") for at in range(50)], blockers=blockers), ON)
    assert len(moved) == MOST_MOVES


def test_the_slowest_blockers_move_first() -> None:
    blockers = [resident(f"b{at}", generated=1_000 * at) for at in range(9)]
    moved = decided(MIGRATION, tail(*[instance(f"idle{at}") for at in range(9)], blockers=blockers), ON)
    assert [one.trajectory for one in moved] == ["b8", "b7", "b6", "b5"]


def test_off_moves_nothing() -> None:
    assert decided(MIGRATION, tail(instance("idle")), Strategies(migration="off")) == []


@given(random_situations())
def test_every_interrupt_has_somewhere_to_go(case: tuple[Situation, StalenessLedger]) -> None:
    one, _ = case
    before = clone(one)
    moved = decided(MIGRATION, one, ON)
    assert same(one, before)
    assert moved == decided(MIGRATION, one, ON)
    fleet = one.fleet
    residents = {each.trajectory: each for each in one.blockers + one.thrashing}
    assert len({each.trajectory for each in moved}) == len(moved)
    for each in moved:
        who = residents[each.trajectory]
        assert fleet.names[who.instance] == each.instance
        assert who.moves < ON.max_moves
        able = fleet.alive & (fleet.version >= who.version) & (fleet.kv_free >= who.context + ON.headroom)
        able[who.instance] = False
        assert able.any()


def test_what_is_relieved_in_one_decision_can_be_placed_again_in_one() -> None:
    """With 10,000 instances more came back in each decision than the next one could place."""
    late = [resident(f"t{at}")._replace(instance=at) for at in range(40)]
    views = [instance(f"full{at}", waiting=1, kv_free=0) for at in range(40)]
    one = situation([*views, *[instance(f"free{at}") for at in range(40)]], thrashing=late)
    assert len(decided(MIGRATION, one, ON)) == 40
    with patch("staleflow.coordinator.routing.MOST_LOOKS", 80 * 20):
        assert len(decided(MIGRATION, one, ON)) == most_routes(80) // 2 == 10


def looked_at_one_by_one(one: Situation, strategies: Strategies) -> list[Interrupt]:
    """Relief as it is meant: for each that waits, the most free of all instances that could take it."""
    fleet, found = one.fleet.copy(), list[Interrupt]()
    excess = fleet.waiting.copy()
    for each in one.thrashing:
        if excess[each.instance] <= 0 or each.moves >= strategies.max_moves:
            continue
        able = fleet.alive & (fleet.version >= each.version) & (fleet.waiting == 0)
        able &= (fleet.running < fleet.max_running) & (fleet.kv_free >= each.context + strategies.headroom)
        able[each.instance] = False
        if able.any():
            fleet.place(int(np.where(able, fleet.kv_free, -1).argmax()), each.context, strategies.headroom)
            excess[each.instance] -= 1
            found.append(Interrupt(each.trajectory, fleet.names[each.instance], "thrashing"))
    return found


@given(st.data())
def test_relief_ranks_instances_as_if_all_were_looked_at_for_each_trajectory(data: st.DataObject) -> None:
    few = st.integers(0, 3)
    views = [
        instance(
            f"i{row}",
            data.draw(few),
            kv_free=1_000 * data.draw(st.integers(0, 6)),
            running=data.draw(few),
            waiting=max(0, data.draw(few) - 1),
            max_running=4,
            alive=data.draw(st.booleans()),
        )
        for row in range(data.draw(st.integers(1, 8)))
    ]
    waiting = [
        replaced(f"t{at}", data.draw(st.integers(0, len(views) - 1)), data.draw(few), 700 * data.draw(few))
        for at in range(data.draw(st.integers(0, 12)))
    ]
    one = situation(views, thrashing=waiting)
    assert decided(MIGRATION, one, ON) == looked_at_one_by_one(one, ON)


def replaced(name: str, row: int, version: int, context: int) -> Resident:
    return resident(name, version, context)._replace(instance=row)
