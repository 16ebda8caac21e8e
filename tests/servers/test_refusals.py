"""Calls that the server must refuse without a trace: an event that cannot be applied would make the journal useless."""

from collections.abc import Callable

import pytest

from staleflow.servers.book import group_name, of_group
from staleflow.servers.lifecycle import Group
from staleflow.servers.trajectories import TrajectoryServer
from tests.servers.small_server import admitted, empty_server, finish, run_to_score, state_of


def test_a_prompt_that_was_given_up_comes_again_before_new_ones_under_another_name() -> None:
    server, _ = empty_server()
    first, second = admitted(server, 2)
    server.release(first, "reward timed out")
    server.release(second, "no signal")
    assert [group.name for group in admitted(server, 3)] == ["p0.1", "p1.1", "p2"]
    server.release(server.groups["p0.1"], "no signal")
    assert [group.name for group in admitted(server)] == ["p0.2"]
    assert [of_group(group_name(*each)) for each in ((7, 0), (7, 3))] == [(7, 0), (7, 3)]


def test_the_surplus_of_a_complete_group_is_given_up_and_its_late_score_is_refused() -> None:
    server, journal = empty_server(size=2, extra=2)
    aborted: list[tuple[str, str]] = []
    server.on_aborted = lambda one, why: aborted.append((one.name, why))
    (group,) = admitted(server)
    first, second, running, judged = group.members
    for one in (running, judged):
        server.place(one.name, "i1", 0)
    server.generated(judged.name, judged.epoch, ((0, 5),))
    assert run_to_score(server, first, 0)
    assert not aborted
    assert run_to_score(server, second, 0)
    assert aborted == [(running.name, "surplus"), (judged.name, "surplus")]
    count = journal.position
    assert server.score(judged.name, 1.0) is None
    assert not server.generated(running.name, running.epoch, ((0, 5),))
    assert journal.position == count


def test_a_move_to_an_older_version_is_refused_where_a_deadline_could_be_missed() -> None:
    server, journal = empty_server(batch=1, staleness=1)
    old, trained = admitted(server, 2)
    server.place(old.members[0].name, "i0", 0)
    finish(server, trained)
    server.consume()
    server.commit(0)
    (young,) = admitted(server)
    one = young.members[0]
    assert server.place(one.name, "i1", 1) is one
    assert server.give_back(one.name, 1, ())
    count = journal.position
    assert server.place(one.name, "i0", 0) is None, "the only place of step 1 is the old group's"
    assert (journal.position, one.state, young.version) == (count, "queued", 1)


def leased(server: TrajectoryServer) -> Group:
    (group,) = admitted(server)
    finish(server, group)
    assert server.take() == [group]
    return group


def release_what_is_in_training(server: TrajectoryServer) -> None:
    server.release(leased(server), "no signal")


def release_without_a_reason(server: TrajectoryServer) -> None:
    (group,) = admitted(server)
    server.place(group.members[0].name, "i0", 0)
    server.release(group, "")


def release_twice(server: TrajectoryServer) -> None:
    (group,) = admitted(server)
    server.release(group, "no signal")
    server.release(group, "no signal")


def commit_a_step_that_is_not_full(server: TrajectoryServer) -> None:
    leased(server)
    server.commit(0)


def roll_back_nothing(server: TrajectoryServer) -> None:
    server.rollback(0)


@pytest.mark.parametrize(
    "misuse",
    [
        release_what_is_in_training,
        release_without_a_reason,
        release_twice,
        commit_a_step_that_is_not_full,
        roll_back_nothing,
    ],
)
def test_a_call_that_raises_does_not_poison_the_journal(misuse: Callable[[TrajectoryServer], None]) -> None:
    server, journal = empty_server()
    with pytest.raises((ValueError, KeyError)):
        misuse(server)
    again, _ = empty_server()
    again.replay(journal.events)
    assert state_of(again) == state_of(server)


def test_a_trajectory_that_was_never_sent_anywhere_cannot_have_been_generated() -> None:
    server, journal = empty_server()
    (group,) = admitted(server)
    count = journal.position
    assert not server.generated(group.members[0].name, 0, ((0, 5),))
    assert journal.position == count


def test_the_bound_tokens_older_than_a_renewed_reservation_move_the_deadline_back() -> None:
    """A member whose instance was taken for dead waits; its group is renewed; then the instance reports after all."""
    server, _ = empty_server(batch=1, staleness=1, size=2)
    group, trained = admitted(server, 2)
    silent, other = group.members
    for one, instance in ((silent, "i0"), (other, "i1")):
        server.place(one.name, instance, 0)
    server.give_back(silent.name, silent.epoch, ())
    finish(server, trained)
    server.consume()
    server.commit(0)
    server.renew(group, 1)
    assert server.generated(silent.name, silent.epoch, ((0, 50),))
    assert group.version == 0, "made under version 0: due by step 1 again"
    assert server.ledger.to_state()["groups"] == [[group.name, 0, "in flight"]]
