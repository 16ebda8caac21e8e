"""Levelling: contexts even out while instances pull, and nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.decide import decide
from staleflow.coordinator.levelling import MOST_MOVES, NEARLY, level
from staleflow.coordinator.situation import Interrupt, Pull, Resident, Route, Situation
from staleflow.coordinator.strategies import Strategies
from staleflow.runtime.fleet import FleetTable, Member
from staleflow.runtime.situate import movable
from staleflow.servers.lifecycle import Group, Trajectory
from tests.coordinator.make_situations import COST, clone, fresh, instance, same, situation
from tests.runtime.fakes import FakeInstance

ON = Strategies(migration="gain", headroom=100)


def long(name: str, row: int, context: int) -> Resident:
    return Resident(name, f"group of {name}", row, context, context, version=1)


def pulled(*rows: tuple[str, list[int]], newest: int = 2) -> Situation:
    """Instances behind the newest version, with trajectories of these contexts on them."""
    views = [instance(name, 1, running=len(held), context=sum(held)) for name, held in rows]
    movable = [long(f"{name}-{at}", row, each) for row, (name, held) in enumerate(rows) for at, each in enumerate(held)]
    return situation(views, newest=newest, movable=movable)


def pulls_of(one: Situation) -> list[Pull]:
    return [Pull(name, one.newest) for name in one.fleet.names]


def test_the_fullest_instance_gives_what_halves_the_gap_to_the_emptiest() -> None:
    one = pulled(("full", [9_000, 4_000, 1_000]), ("empty", []))
    interrupts, fleet = level(one, ON, pulls_of(one))
    assert interrupts == [Interrupt("full-0", "full", "levelling")]
    assert fleet.context.tolist() == [5_000, 9_000]
    assert fleet.running.tolist() == [2, 1]


def test_a_single_trajectory_is_not_sent_to_an_empty_instance_and_back() -> None:
    one = pulled(("a", [9_000]), ("b", []))
    assert level(one, ON, pulls_of(one))[0] == []


def test_only_instances_that_pull_take_part() -> None:
    one = pulled(("full", [6_000, 5_000]), ("empty", []))
    assert level(one, ON, [Pull("full", 2)])[0] == []
    assert level(one, ON, [])[0] == []


def test_no_move_without_memory_or_a_slot_at_the_target() -> None:
    for lack in ({"kv_free": 5_000}, {"running": 8, "max_running": 8}, {"waiting": 1}, {"alive": False}):
        one = pulled(("full", [6_000, 5_000]))
        views = [instance("full", 1, running=2, context=11_000), instance("target", 1, **lack)]  # type: ignore[arg-type]
        one = situation(views, newest=2, movable=one.movable)
        assert level(one, ON, pulls_of(one))[0] == [], lack


def test_levelling_is_for_gain_only() -> None:
    one = pulled(("full", [6_000, 5_000]), ("empty", []))
    for mode, moves in (("gain", 1), ("blocked", 0), ("off", 0)):
        commands = decide(one, replace(ON, migration=mode)).commands
        assert sum(isinstance(command, Interrupt) for command in commands) == moves


def test_fresh_work_is_routed_as_if_what_moves_had_arrived() -> None:
    one = pulled(("full", [6_000, 5_000]), ("empty", []))
    one.queue, one.room, one.group_size = fresh("g", 500), {2: 1}, 1
    routes = [command for command in decide(one, ON).commands if isinstance(command, Route)]
    assert [route.instance for route in routes] == ["full"], "it holds 5,000 tokens then, the other one 6,000"


@pytest.mark.parametrize(("step_s", "found"), [(0.0, 2), (0.5, 0), (100.0, 2)])
def test_nothing_is_movable_where_versions_come_faster_than_decisions_pay(step_s: float, found: int) -> None:
    table = FleetTable([Member(FakeInstance(name), 1, version=1) for name in ("full", "empty")], COST, 100)
    table.fleet.version[:], table.fleet.alive[:], table.fleet.context[0] = 1, True, 11_000
    group = Group("g", prompt=0, attempt=0, prompt_tokens=1_000, needed=2, version=1)
    for at, tokens in enumerate((6_000, 5_000)):
        each = Trajectory(f"g/{at}", group, state="running", instance="full")
        each.stamp(((1, tokens),))
        table.members[0].residents[each.name] = each
    assert [each.context for each in movable(table, 2, step_s)] == [7_000, 6_000][:found]


@st.composite
def pulling(draw: st.DrawFn) -> Situation:
    contexts = st.lists(st.integers(1, 20_000), max_size=8)
    rows = draw(st.lists(contexts, min_size=1, max_size=12))
    return pulled(*((f"i{row}", held) for row, held in enumerate(rows)))


@given(pulling())
def test_every_move_makes_the_fleet_more_even_and_keeps_what_there_is(one: Situation) -> None:
    before = clone(one)
    interrupts, fleet = level(one, ON, pulls_of(one))
    assert same(one, before), "the situation stays as it was"
    assert len({interrupt.trajectory for interrupt in interrupts}) == len(interrupts) <= MOST_MOVES
    assert fleet.context.sum() == one.fleet.context.sum()
    assert fleet.running.sum() == one.fleet.running.sum()
    assert np.square(fleet.context).sum() <= np.square(one.fleet.context).sum() - len(interrupts)
    assert fleet.context.max(initial=0) <= one.fleet.context.max(initial=0)
    where = {resident.trajectory: one.fleet.names[resident.instance] for resident in one.movable}
    assert all(where[interrupt.trajectory] == interrupt.instance for interrupt in interrupts)


def one_look_at_all_for_each_move(one: Situation) -> list[tuple[str, int]]:
    """The definition: what moves, and to which row."""
    contexts = {row: context for row, context in enumerate(one.fleet.context.tolist()) if one.fleet.alive[row]}
    free, held, moves = one.fleet.kv_free.tolist(), list(one.movable), list[tuple[str, int]]()
    while len(contexts) > 1 and len(moves) < MOST_MOVES:
        source, target = max(contexts, key=contexts.__getitem__), min(contexts, key=contexts.__getitem__)
        gap = contexts[source] - contexts[target]
        if gap <= NEARLY * (sum(contexts.values()) / len(contexts)):
            break
        smaller = [each for each in held if each.instance == source and each.context < gap]
        if not smaller:
            del contexts[source]
        elif free[target] < (best := min(smaller, key=lambda each: abs(each.context - gap / 2))).context + ON.headroom:
            del contexts[target]
        else:
            held.remove(best)
            for row, tokens in ((source, -best.context), (target, best.context)):
                contexts[row] += tokens
                free[row] -= tokens + (ON.headroom if tokens > 0 else 0)
            moves.append((best.trajectory, target))
    return moves


@given(pulling(), st.lists(st.integers(0, 40_000), min_size=12, max_size=12))
def test_the_ranking_of_rows_chooses_what_a_look_at_all_of_them_would(one: Situation, free: list[int]) -> None:
    one.fleet.kv_free[:] = free[: len(one.fleet.names)]
    interrupts, _ = level(one, ON, pulls_of(one))
    assert [each.trajectory for each in interrupts] == [name for name, _ in one_look_at_all_for_each_move(one)]
