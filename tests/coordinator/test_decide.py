"""A whole decision: the strategies see each other's commands, and the rules hold together."""

import json
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.decide import decide
from staleflow.coordinator.situation import Abort, Interrupt, Pace, Pull, Resident, Route, Situation, Truncate
from staleflow.coordinator.strategies import Strategies
from staleflow.protocol import StalenessLedger
from tests.coordinator.make_situations import clone, fresh, instance, random_situations, same, situation, started

ANY = st.builds(
    Strategies,
    routing=st.sampled_from(["waterfall", "least_loaded", "round_robin"]),
    synchronisation=st.sampled_from(["gain", "greedy", "starved"]),
    migration=st.sampled_from(["gain", "blocked", "off"]),
    tail=st.sampled_from(["wait", "replace", "truncate"]),
    mu=st.sampled_from([0.0, 0.3]),
)


def test_concentration_all_pull_first_and_fresh_work_spreads_over_them() -> None:
    views = [instance(f"i{row}", 0, running=1, context=500) for row in range(4)]
    commands = decide(
        situation(views, fresh("f", 500, 500) + fresh("g", 500, 500), {0: 0, 1: 2}, newest=1), Strategies()
    ).commands
    assert commands[:4] == [Pull(f"i{row}", 1) for row in range(4)]
    assert {each.instance for each in commands if isinstance(each, Route)} == {"i0", "i1", "i2", "i3"}


def test_deadlock_an_idle_fleet_behind_the_ledger_gets_going_in_one_decision() -> None:
    one = situation([instance("i", 0)], fresh("f", 500), {0: 0, 1: 1}, newest=1, pull_s=500.0)
    for mode in ("gain", "greedy", "starved"):
        assert decide(one, Strategies(synchronisation=mode)).commands == [Pull("i", 1), Route("f.0", "f", "i", 1)]


def test_an_interrupted_trajectory_is_resumed_first_and_keeps_its_version() -> None:
    one = situation([instance("i", 3, max_running=1)], started("old", 1, 5_000) + fresh("f", 10), {3: 1})
    assert decide(one, Strategies()).commands == [Route("old.0", "old", "i", 3)]


def test_what_the_tail_ends_is_neither_moved_nor_routed() -> None:
    blocker = Resident("b", "stuck", 0, 2_000, 1_500, 1)
    one = situation(
        [instance("crowded", running=100, context=400_000), instance("idle")],
        started("stuck", 1, 500),
        pace=Pace(step_s=20.0, mean_tokens=1_000.0),
        blockers=[blocker],
        blocked_since=80.0,
    )
    assert [type(each) for each in decide(one, Strategies()).commands] == [Interrupt, Route]
    assert decide(one, Strategies(tail="replace")).commands == [Abort("stuck", "tail")]
    ended = decide(one, Strategies(tail="truncate")).commands
    assert ended == [Truncate("b", "crowded"), Route("stuck.0", "stuck", "idle", 1)], "the other member goes on"


@given(random_situations(), ANY)
def test_a_decision_is_a_pure_function_and_can_be_recorded(
    case: tuple[Situation, StalenessLedger], strategies: Strategies
) -> None:
    one, _ = case
    before = clone(one)
    decision = decide(one, strategies)
    assert same(one, before)
    assert decision == decide(before, strategies)
    assert json.loads(json.dumps(decision.inputs)) == decision.inputs


@given(random_situations(), ANY)
def test_every_placement_is_one_that_the_ledger_grants(
    case: tuple[Situation, StalenessLedger], strategies: Strategies
) -> None:
    one, ledger = case
    commands = decide(one, strategies).commands
    pulled = {each.instance for each in commands if isinstance(each, Pull)}
    versions = dict(zip(one.fleet.names, one.fleet.version.tolist(), strict=True))
    held = {item.group: item.version for item in one.queue}
    for each in commands:
        if isinstance(each, Route):
            assert each.version == (one.newest if each.instance in pulled else versions[each.instance])
            if held[each.group] is None:
                assert ledger.reserve(each.group, each.version)
                held[each.group] = each.version
            assert each.version >= (held[each.group] or 0)


@given(random_situations(), ANY)
def test_no_deadlock_an_idle_instance_works_or_pulls_whenever_something_could_start(
    case: tuple[Situation, StalenessLedger], strategies: Strategies
) -> None:
    """With an empty fleet that has the memory, work that the newest version may take, and nothing in progress,
    some decision within two must route something."""
    one, _ = case
    views = [instance(f"i{row}", int(version)) for row, version in enumerate(one.fleet.version)]
    if not views or not (one.reserved or (one.queue and one.room[one.newest] > 0)):
        return
    one = replace(one, fleet=situation(views).fleet, blockers=[], thrashing=[])
    first = decide(one, strategies).commands
    assert any(isinstance(each, Route) for each in first) or any(isinstance(each, Pull) for each in first)
    if not any(isinstance(each, Route) for each in first):
        pulled = {each.instance for each in first if isinstance(each, Pull)}
        after = [instance(v.name, one.newest if v.name in pulled else v.version) for v in views]
        second = decide(replace(one, fleet=situation(after).fleet), strategies).commands
        assert any(isinstance(each, Route) for each in second)


@given(random_situations(), ANY, st.integers(1, 3))
def test_a_version_is_pulled_in_parts_and_nothing_is_sent_to_those_whose_pull_comes_later(
    case: tuple[Situation, StalenessLedger], strategies: Strategies, most: int
) -> None:
    """It would be of the older version that they hold until then."""
    one, _ = case
    everyone = {each.instance for each in decide(one, strategies).commands if isinstance(each, Pull)}
    with patch("staleflow.coordinator.decide.MOST_PULLS", most):
        decision = decide(one, strategies)
    pulls = [each.instance for each in decision.commands if isinstance(each, Pull)]
    assert len(pulls) == min(most, len(everyone))
    later = everyone - set(pulls)
    assert decision.cut == bool(later)
    assert not any(isinstance(each, Route) and each.instance in later for each in decision.commands)


def test_parts_of_a_pull_end_with_every_instance_on_the_new_version() -> None:
    one = situation([instance(f"i{row}", 0) for row in range(7)], fresh("f", 500), {0: 1, 1: 1}, newest=1)
    cuts: list[bool] = []
    with patch("staleflow.coordinator.decide.MOST_PULLS", 3):
        while (one.fleet.version < 1).any():
            decision = decide(one, Strategies())
            cuts.append(decision.cut)
            for each in decision.commands:
                if isinstance(each, Pull):
                    row = one.fleet.names.index(each.instance)
                    one.fleet.version[row], one.fleet.pulling[row] = each.version, True
    assert cuts == [True, True, False]
