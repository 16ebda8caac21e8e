"""The control plane between fake parts: late, repeated and contradicting reports, and what must follow from each."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from staleflow.coordinator.decide import Decision
from staleflow.runtime.control import StalledError
from staleflow.simulate.clock import VirtualLoop
from staleflow.types import Failed, TrajectoryNews
from tests.runtime.fakes import FakeInstance, World, on_virtual_time, virtual
from tests.servers.small_server import state_of


@virtual
async def test_reports_that_are_late_repeated_or_from_another_incarnation_change_nothing() -> None:
    world = World()
    await world.begin()
    row = TrajectoryNews("p0/0", 1, ((0, 10),))
    instance, control = world.instances["i0"], world.control
    control.on_report(instance.report(finished=[row]))
    control.on_scored("p0/0", 1.0)
    before, count = state_of(world.server), world.journal.position
    other = [TrajectoryNews("p1/0", epoch, ((0, 9),)) for epoch in (1, 0, 2)]
    for kind in ("finished", "returned", "progress"):
        report = instance.report(**{kind: [row]})
        control.on_report(report)
        control.on_report(replace(report, incarnation=7, finished=other[:1]))
        control.on_report(replace(report, instance="nobody"))
    control.on_report(instance.report(finished=other[1:]))
    control.on_scored("p0/0", 0.0)
    control.on_scored("p1/0", 1.0)
    control.on_score_failed("p0/0", "late")
    control.on_pushed(1)
    assert (state_of(world.server), world.journal.position) == (before, count)


@virtual
async def test_a_reward_that_cannot_be_had_releases_the_group_with_the_reason_and_its_prompt_comes_again() -> None:
    world = World(settings={"reward_timeout_s": 5.0, "reward_tries": 2})
    await world.begin()
    world.finish("p0/0")
    world.finish("p1/0")
    world.control.on_score_failed("p1/0", "judge is down")
    world.control.on_score_failed("p1/0", "judge is down")
    await asyncio.sleep(12)
    assert world.server.ledger.counts()["released"] == {"judge is down": 1, "reward timed out": 1}
    assert {"p0.1", "p1.1"} <= set(world.server.groups)
    assert {"p0.1/0", "p1.1/0"} <= {work.trajectory for work in world.instances["i0"].submitted}


def test_every_decision_is_told_with_what_it_was_decided_on() -> None:
    async def main() -> list[tuple[float, Decision]]:
        world = World()
        decisions: list[tuple[float, Decision]] = []
        world.control.on_decision = lambda at, decision: decisions.append((at, decision))
        world.start()
        await asyncio.sleep(1)
        return decisions

    (at, first), *_ = on_virtual_time(main())
    inputs: dict[str, Any] = json.loads(json.dumps(first.inputs))
    assert at == inputs["now"] == 0.0
    assert (inputs["alive"], inputs["queued"], inputs["room"]) == (1, 4, {"0": 4})
    assert inputs["routing"]["routes"] == len(first.commands) == 4


@virtual
async def test_data_that_ends_too_early_is_a_named_stall_and_not_a_hang() -> None:
    world = World(batch=2, prompts=3, settings={"stall_s": 100.0})
    run = await world.begin(steps=2)
    world.finish_and_score("p0/0", "p1/0", "p2/0")
    world.push()
    with pytest.raises(StalledError, match=r"step 1 waits for more complete groups \(1 of 2 are there\)"):
        await run


@virtual
async def test_a_step_whose_push_was_seen_only_after_the_restart_is_not_the_end_of_the_run() -> None:
    world = World()
    await world.begin(steps=3)
    world.finish_and_score("p0/0", "p1/0")
    again = World()
    again.server.replay(world.journal.events)
    again.trainer.version = 1
    again.control.recover(steps=3)
    assert again.server.ledger.version == 1
    run = again.start(steps=3)
    await asyncio.sleep(10)
    assert not run.done()
    assert "p2/0" in {work.trajectory for work in again.instances["i0"].submitted}


@virtual
async def test_an_instance_that_is_known_to_be_dead_gets_no_work_for_what_it_said_before() -> None:
    """Its last report was young enough for it to be taken for alive, until another took its place."""
    world = World()
    await world.begin()
    dead = world.instances["i0"]
    dead.silent_since = asyncio.get_running_loop().time()
    await asyncio.sleep(1)
    world.control.left("i0")
    sent = len(dead.commands)
    await asyncio.sleep(50)
    assert not world.control.members["i0"].alive
    assert len(dead.commands) == sent
    dead.silent_since = None
    await asyncio.sleep(50)
    assert world.control.members["i0"].alive, "it was not dead after all"


@virtual
async def test_a_run_that_is_stopped_and_continued_as_a_whole_takes_no_instance_for_dead() -> None:
    """Every instance had been silent for as long: each lost all that it held, and had no work until the next look."""
    world = World()
    await world.begin()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    instance = world.instances["i0"]
    instance.silent_since = loop.time()
    loop.jump(1000.0)
    await asyncio.sleep(1)
    assert world.control.members["i0"].alive
    instance.silent_since = None
    await asyncio.sleep(100)
    assert "lost" not in [event[0] for event in world.journal.events]
    instance.silent_since = loop.time()
    await asyncio.sleep(100)
    assert not world.control.members["i0"].alive, "now it is silent, and nobody else is"


@virtual
async def test_a_last_version_that_was_seen_only_after_the_restart_is_the_end_and_nothing_is_leased_after_it() -> None:
    """The next control plane committed the last step before it was told how many there are, and leased the next."""
    world = World()
    await world.begin(steps=1)
    world.finish_and_score("p0/0", "p1/0", "p2/0", "p3/0")
    again = World()
    again.server.replay(world.journal.events)
    again.trainer.version = 1
    again.control.recover(steps=1)
    await again.start(steps=1)
    assert [event[0] for event in again.journal.events if event[0] != "join"] == ["push", "commit"]
    assert again.trainer.fed == []
    last = World()
    last.server.replay([*world.journal.events, *again.journal.events])
    last.control.recover(steps=1)
    assert {event[0] for event in last.journal.events} <= {"join"}, "nor by the control plane after that one"


@virtual
async def test_a_step_that_the_trainer_ends_while_the_control_plane_is_restarted_is_not_trained_again() -> None:
    """A reset would come after the push; so nothing is said until the trainer has said which version it holds."""
    world = World()
    await world.begin(steps=3)
    world.finish_and_score("p0/0", "p1/0")
    again = World()
    again.server.replay(world.journal.events)
    again.control.recover(steps=3, trainer_there=False)
    await again.begin(steps=3)
    assert (again.trainer.resets, again.trainer.fed) == (0, []), "it may still be at work on step 0"
    again.trainer.version = 1
    again.control.on_trainer_back()
    assert again.server.ledger.version == 1
    again.finish_and_score("p2/0", "p3/0")
    assert again.trainer.fed == [(1, "p2"), (1, "p3")]


@pytest.mark.parametrize("late", [False, True])
@virtual
async def test_what_an_instance_holds_for_a_dead_control_plane_continues_only_if_nobody_else_has_it(
    late: bool,
) -> None:
    world = World()
    await world.begin()
    held = [(each.trajectory, each.epoch) for each in world.instances["i0"].submitted]
    instance = FakeInstance("i0")
    instance.holding = [*held, ("p77/0", 1)]
    again = World(instances=())
    again.server.replay(world.journal.events)
    if not late:
        again.control.join(instance)
    again.control.recover(steps=3)
    if late:
        again.control.join(instance)
    assert instance.aborted == (instance.holding if late else [("p77/0", 1)])
    assert {each.state for each in again.server if each.epoch} == {"queued" if late else "running"}
    await again.begin()
    assert {each.trajectory for each in instance.submitted}.isdisjoint(dict(held)) != late


@virtual
async def test_a_surplus_member_that_cannot_be_scored_does_not_take_its_complete_group_down() -> None:
    world = World(extra=1, consume="batch", settings={"reward_tries": 1})
    await world.begin()
    world.finish("p0/0")
    world.finish("p0/1")
    world.control.on_scored("p0/0", 1.0)
    assert world.server.groups["p0"].complete
    world.control.on_score_failed("p0/1", "judge is down")
    assert world.server.ledger.counts()["released"] == {}


@virtual
async def test_a_step_that_a_release_makes_ready_is_fed_at_once() -> None:
    world = World(batch=1, settings={"reward_tries": 1})
    await world.begin()
    world.finish_and_score("p0/0")  # p1 is of version 0 too, and due in step 1
    world.push()
    world.control.on_report(world.instances["i0"].report(progress=[TrajectoryNews("p1/0", 1, ((0, 5),))], pulled=1))
    await asyncio.sleep(1)
    world.finish_and_score("p2/0", version=1)
    assert world.trainer.names() == ["p0"], "step 1 waits for p1"
    world.finish("p1/0")
    world.control.on_score_failed("p1/0", "judge is down")
    assert world.trainer.names() == ["p0", "p2"]


@virtual
async def test_tokens_of_an_instance_that_seemed_dead_cannot_slip_under_the_bound() -> None:
    world = World(batch=1, size=2, instances=("i0", "i1"), routing="round_robin")
    await world.begin()
    silent, other = world.server.groups["p1"].members
    assert (silent.instance, other.instance) == ("i0", "i1")
    world.instances["i0"].silent_since = 0.0
    world.instances["i1"].kv_free = 0
    world.finish_and_score("p0/0", "p0/1")
    await asyncio.sleep(80)
    assert silent.state == "queued", "i0 was taken for dead and i1 has no memory for it"
    world.push()
    world.control.on_report(world.instances["i1"].report(pulled=1))
    world.control.on_report(world.instances["i0"].report(finished=[TrajectoryNews(silent.name, 1, ((0, 50),))]))
    version = world.server.groups["p1"].version
    assert version is not None
    assert all(made >= version for made, _ in silent.spans)


def test_whether_the_trainer_or_an_instance_tells_of_a_version_first_does_not_matter() -> None:
    async def main(trainer_first: bool, joins_late: bool) -> tuple[object, ...]:
        world = World(batch=1, staleness=2)
        run = world.start()
        await asyncio.sleep(1)
        world.finish_and_score("p0/0")
        late = FakeInstance("late", version=1)
        tell = {
            "trainer": world.push,
            "i0": lambda: world.control.on_report(world.instances["i0"].report(pulled=1)),
            "late": lambda: world.control.join(late) if joins_late else None,
        }
        for each in tell if trainer_first else reversed(tell):
            tell[each]()
        tell["i0"]()
        await asyncio.sleep(5)
        assert not run.done(), "the ledger was asked about a version that it did not know"
        versions = {group.name: group.version for group in world.server.groups.values()}
        members = {each.name: (each.version, each.pulling) for each in world.control.members.values()}
        return world.server.ledger.counts(), versions, members, [work.trajectory for work in late.submitted]

    for joins_late in (False, True):
        first, second = (on_virtual_time(main(trainer_first, joins_late)) for trainer_first in (True, False))
        assert first == second


@virtual
async def test_a_version_that_an_instance_sees_early_counts_only_once_it_is_announced() -> None:
    world = World(batch=1, staleness=2)
    run = await world.begin()
    world.finish_and_score("p0/0")
    member = world.control.members["i0"]
    world.control.on_report(world.instances["i0"].report(pulled=1))
    await asyncio.sleep(5)
    assert not run.done()
    assert (member.version, world.server.ledger.version) == (0, 0)
    world.push()
    assert (member.version, world.server.ledger.version) == (1, 1)
    assert {group.version for group in world.server.groups.values() if group.version is not None} == {1}


@pytest.mark.parametrize("stopped", [False, True])
@virtual
async def test_nothing_changes_once_the_last_version_is_made(stopped: bool) -> None:
    """The laptop run that admitted 44 groups instead of 40: a decision was due when the last step was committed."""
    world = World(batch=1, staleness=1, instances=("i0", "i1"))
    run = await world.begin(steps=5 if stopped else 1)
    control, instance = world.control, world.instances["i0"]
    world.finish_and_score("p0/0")
    if stopped:
        control.stop()
        assert not control.over, "step 0 is in training"
    world.push()
    before, count, routed = state_of(world.server), world.journal.position, list(instance.submitted)
    for _ in range(3):
        control.on_report(instance.report(finished=[TrajectoryNews("p1/0", 1, ((0, 9),))], pulled=1))
        control.on_scored("p1/0", 1.0)
        control.on_score_failed("p1/0", "judge is down")
        control.left("i1")
        control.join(FakeInstance("i1", incarnation=1))
        control.on_trainer_lost()
        control.on_trainer_back()
        await asyncio.sleep(0)
    await run
    assert (state_of(world.server), world.journal.position, instance.submitted) == (before, count, routed)


@virtual
async def test_an_instance_that_joins_again_in_a_new_incarnation_does_not_keep_its_old_work() -> None:
    world = World()
    await world.begin()
    instance = world.instances["i0"]
    work = {each.trajectory for each in instance.submitted}
    instance.incarnation, instance.commands = 1, []
    world.control.join(instance)
    await asyncio.sleep(5)
    assert {each.trajectory for each in instance.submitted} == work


@virtual
async def test_the_drop_of_lost_work_names_the_epoch_that_was_lost() -> None:
    world = World(batch=1, staleness=0, instances=("i0", "i1"))
    await world.begin()
    (one,) = world.server.groups["p0"].members
    first = world.instances[one.instance or ""]
    first.silent_since = 0.0
    await asyncio.sleep(100)
    assert (one.epoch, one.instance != first.name) == (2, True)
    first.silent_since = None
    await asyncio.sleep(30)
    assert first.aborted == [(one.name, 1)]


@virtual
async def test_the_last_push_ends_the_run_even_if_only_the_return_of_the_trainer_is_heard() -> None:
    world = World()
    run = await world.begin(steps=1)
    world.finish_and_score("p0/0", "p1/0")
    world.trainer.version = 1
    world.control.on_trainer_back()
    await asyncio.sleep(1)
    assert world.server.ledger.version == 1
    assert run.done()


@virtual
async def test_a_stall_names_the_trainer_when_it_is_the_trainer_that_is_waited_for() -> None:
    world = World(settings={"stall_s": 100.0})
    run = await world.begin()
    world.finish_and_score("p0/0", "p1/0")
    with pytest.raises(StalledError, match=r"step 0 .*trainer"):
        await run


@virtual
async def test_a_crash_between_the_last_score_and_the_completion_of_its_group_does_not_stall_the_run() -> None:
    world = World()
    await world.begin()
    world.finish_and_score("p0/0", "p1/0")
    events = world.journal.events
    cut = max(at for at, event in enumerate(events) if event[0] == "score")
    assert events[cut + 1][0] == "occupy"
    again = World()
    again.server.replay(events[: cut + 1])
    again.control.recover(steps=3)
    assert again.server.groups["p1"].complete
    assert sorted(again.trainer.names()) == ["p0", "p1"]


@virtual
async def test_a_crash_between_the_completion_of_a_group_and_the_filter_does_not_train_on_it() -> None:
    world = World(consume="batch")
    await world.begin()
    world.finish_and_score("p0/0")
    again = World(consume="batch")
    again.server.replay(world.journal.events)
    again.control.filter = lambda group: "no signal" if group.name == "p0" else None
    again.control.recover(steps=3)
    assert "p0" not in again.server.groups
    assert again.server.owed == [], "what teaches nothing is not tried again"


@virtual
async def test_a_response_that_is_too_old_for_its_group_does_not_end_the_run_when_its_instance_pulls() -> None:
    """It was queued again and still counted as running there: nobody held the group when the pull was reported."""
    world = World()
    await world.begin()
    world.finish_and_score("p0/0", "p1/0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.server, "_checked", lambda *_: None)
        world.finish("p2/0")
    assert world.server.trajectories["p2/0"].state == "queued"
    assert "p2/0" not in world.control.members["i0"].residents
    world.push()
    world.control.on_report(world.instances["i0"].report(pulled=1))
    assert world.control.members["i0"].version == 1


@virtual
async def test_a_failure_that_is_reported_twice_does_not_hide_what_was_sent_there_again() -> None:
    """Nobody would have given it back had the instance died: its group was waited for without end."""
    world = World()
    await world.begin()
    one, report = (
        world.server.trajectories["p0/0"],
        world.instances["i0"].report(failed=[Failed("p0/0", 1, "full")]),
    )
    world.control.on_report(report)
    await asyncio.sleep(1)
    assert (one.state, one.epoch) == ("running", 2)
    world.control.on_report(report)
    world.control.left("i0")
    assert one.state == "queued"


@virtual
async def test_a_report_that_cannot_be_true_costs_one_trajectory_its_progress_and_nobody_else_anything() -> None:
    world = World()
    await world.begin()
    complaints: list[tuple[str, str]] = []
    world.control.reports.on_bad = lambda instance, _, why: complaints.append((instance, why))
    instance = world.instances["i0"]
    lie, truth = TrajectoryNews("p0/0", 1, ((7, 10),)), TrajectoryNews("p1/0", 1, ((0, 10),))
    world.control.on_report(instance.report(finished=[lie, truth]))
    assert complaints == [("i0", "trajectory p0/0 has tokens of version 7, but the newest that can exist is 0")]
    assert world.server.trajectories["p0/0"].state == "queued"
    assert world.server.trajectories["p1/0"].state == "generated"
    assert ("p0/0", 1) in instance.aborted, "whoever sent it is told to forget it"
    await asyncio.sleep(5)
    assert world.server.trajectories["p0/0"].epoch == 2, "and it is tried again"


@virtual
async def test_a_version_that_an_instance_holds_before_the_trainer_has_said_so_does_not_end_the_run() -> None:
    """The store hands out the newest version, and two messages about it race."""
    world = World(batch=1)
    await world.begin()
    world.finish_and_score("p0/0")
    instance, member = world.instances["i0"], world.control.members["i0"]
    begun = TrajectoryNews("p1/0", 1, ((1, 5),))
    world.control.on_report(instance.report(pulled=1))
    world.control.on_report(instance.report(progress=[begun]))
    await asyncio.sleep(1)
    assert (world.server.ledger.version, member.version) == (0, 0)
    assert world.server.groups["p1"].version == 0
    world.push()
    assert (member.version, member.pulling) == (1, None)
    await asyncio.sleep(1)
    assert all(work.epoch for work in instance.submitted)
    assert "p2/0" in {work.trajectory for work in instance.submitted}


@virtual
async def test_a_trajectory_that_only_ever_gets_bad_reports_is_given_up_with_its_group() -> None:
    world = World()
    world.start()
    for epoch in (1, 2, 3):
        await asyncio.sleep(5)
        world.control.on_report(world.instances["i0"].report(finished=[TrajectoryNews("p0/0", epoch, ((7, 10),))]))
    assert "p0" not in world.server.groups
    assert world.server.ledger.counts()["released"] == {"bad reports": 1}
    assert world.server.owed == [0] or "p0.1" in world.server.groups


@virtual
async def test_what_a_step_waits_for_is_said_in_words_and_not_by_names_alone() -> None:
    """It was "waits for groups p0", which says nothing about why."""
    world = World(batch=2)
    await world.begin()
    waits_for = world.control.watch.waits_for
    assert waits_for().startswith("2 of 4 groups: p0 (decoding, 0 tokens), p1 (decoding, 0 tokens), "), "any two"
    world.finish_and_score("p2/0", "p3/0")
    world.control.on_report(world.instances["i0"].report(progress=[TrajectoryNews("p1/0", 1, ((0, 212),))]))
    world.push()
    world.finish("p0/0")
    await asyncio.sleep(1)
    assert waits_for().startswith("2 of ")
    assert "p0 (being scored), p1 (decoding, 212 tokens)" in waits_for()
    world.control.on_scored("p0/0", 1.0)
    assert "1 of 2 groups: p1 (decoding, 212 tokens)" in waits_for()
