"""The trainer's feed: each group reaches exactly one committed step, whenever the trainer dies."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.coordinator.strategies import Consume
from staleflow.runtime.feed import TrainerFeed
from staleflow.servers.lifecycle import Group, Trajectory
from tests.runtime.fakes import FakeTrainer
from tests.servers.small_server import admitted, empty_server, finish


class Bench:
    def __init__(self, consume: Consume = "stream", batch: int = 2, staleness: int = 1, redundancy: int = 0) -> None:
        self.server, _ = empty_server(batch, staleness, redundancy)
        self.ledger = self.server.ledger
        self.trainer = FakeTrainer()
        self.dropped: list[Trajectory] = []
        self.feed = TrainerFeed(self.server, self.trainer, consume, self.dropped.extend)
        self.committed: list[str] = []
        self.server.on_committed = lambda _, groups: self.committed.extend(group.name for group in groups)

    def complete(self, count: int = 1) -> None:
        """So many groups more are complete, as far as the ledger has room for them."""
        for _ in range(count):
            if self.ledger.room(self.ledger.version):
                (group,) = admitted(self.server)
                finish(self.server, group)
                self.feed.push_on()

    def push(self) -> bool:
        self.trainer.version += 1
        return self.feed.pushed(self.trainer.version)

    def die(self) -> bool:
        self.trainer.fed, self.trainer.finished = [], []
        return self.feed.lost()


def test_streamed_groups_do_not_wait_for_the_rest_of_their_step() -> None:
    bench = Bench("stream", batch=3)
    fed: list[int] = []
    for _ in range(3):
        assert not bench.trainer.finished
        bench.complete()
        fed.append(len(bench.trainer.fed))
    assert fed == [1, 2, 3]
    assert bench.trainer.finished == [0]


@pytest.mark.parametrize("consume", ["stream", "batch"])
def test_after_the_last_step_nothing_more_is_trained(consume: Consume) -> None:
    """Scores that came after it completed another step, and the last checkpoint held one version too many."""
    bench = Bench(consume, batch=2)
    bench.complete(2)
    assert bench.push()
    bench.feed.end()
    bench.trainer.fed, bench.trainer.finished = [], []
    bench.complete(3)
    bench.feed.back()
    bench.feed.push_on()
    assert bench.trainer.fed == bench.trainer.finished == []
    assert bench.ledger.frontier == bench.ledger.version == 1


def test_a_batch_is_not_fed_in_parts() -> None:
    bench = Bench("batch", batch=3)
    bench.complete(2)
    assert bench.trainer.fed == []
    bench.complete()
    assert bench.trainer.fed == [(0, "p0"), (0, "p1"), (0, "p2")]
    assert bench.trainer.finished == [0]


@pytest.mark.parametrize("consume", ["stream", "batch"])
def test_nothing_of_the_next_step_is_fed_before_the_commit(consume: Consume) -> None:
    bench = Bench(consume)
    bench.complete(4)
    assert bench.trainer.names() == ["p0", "p1"]
    assert bench.push()
    bench.feed.push_on()
    assert bench.trainer.fed[2:] == [(1, "p2"), (1, "p3")]


@pytest.mark.parametrize("complete", [1, 2])
def test_a_trainer_that_dies_before_its_push_gets_the_same_groups_again(complete: int) -> None:
    bench = Bench()
    bench.complete(complete)
    before = bench.trainer.names()
    assert not bench.die()
    bench.complete()
    assert bench.trainer.fed == [], "nothing is fed to a trainer that is down"
    bench.feed.back()
    bench.feed.push_on()
    assert bench.trainer.names()[:complete] == before
    assert bench.trainer.finished == [0]
    assert bench.push()
    assert bench.committed == ["p0", "p1"]


def test_a_trainer_that_dies_after_its_push_does_not_train_the_step_again() -> None:
    bench = Bench()
    bench.complete(2)
    bench.trainer.version = 1
    assert bench.die(), "the version that nobody was told of is news"
    assert bench.committed == ["p0", "p1"]
    bench.feed.back()
    bench.complete(2)
    assert bench.trainer.fed == [(1, "p2"), (1, "p3")]


@pytest.mark.parametrize("version", [0, 2, 7])
def test_a_push_that_is_not_the_next_version_commits_nothing(version: int) -> None:
    bench = Bench()
    bench.complete(2)
    assert not bench.feed.pushed(version)
    assert bench.committed == []


def test_a_push_is_news_once_and_only_for_a_full_step() -> None:
    bench = Bench()
    bench.complete(1)
    assert not bench.feed.pushed(1)
    bench.complete(1)
    assert bench.feed.pushed(1)
    assert not bench.feed.pushed(1)
    assert bench.ledger.version == 1


def test_a_control_plane_that_comes_back_makes_the_trainer_forget_half_a_step() -> None:
    bench = Bench()
    bench.complete(1)
    assert not bench.feed.back()
    assert (bench.trainer.resets, bench.ledger.taken) == (1, 0)
    bench.feed.push_on()
    assert bench.trainer.names() == ["p0"]


@pytest.mark.parametrize("consume", ["stream", "batch"])
def test_a_group_that_is_completed_while_others_are_handed_over_does_not_end_the_step_twice(consume: Consume) -> None:
    """What is said to the trainer may let others speak at once, and what they say may fill the step."""
    bench = Bench(consume)
    first, second = admitted(bench.server, 2)
    finish(bench.server, first)
    feed = bench.trainer.feed

    def answered_at_once(step: int, groups: Sequence[Group]) -> None:
        feed(step, groups)
        if not second.complete:
            finish(bench.server, second)
        bench.feed.push_on()

    bench.trainer.feed = answered_at_once
    bench.feed.push_on()
    if consume == "batch":
        finish(bench.server, second)
        bench.feed.push_on()
    assert bench.trainer.names() == ["p0", "p1"]
    assert bench.trainer.finished == [0]


def test_groups_given_up_to_fill_a_step_are_dropped_where_they_run() -> None:
    bench = Bench(batch=1, staleness=0, redundancy=1)
    running, finished = admitted(bench.server, 2)
    one = running.members[0]
    bench.server.place(one.name, "i0", 0)
    finish(bench.server, finished)
    bench.feed.push_on()
    assert bench.trainer.names() == [finished.name]
    assert bench.dropped == [one]
    assert bench.server.owed == [running.prompt]


def test_a_repeated_message_that_the_trainer_is_back_does_not_feed_its_groups_twice() -> None:
    bench = Bench()
    bench.complete(1)
    bench.die()
    for _ in range(2):
        bench.feed.back()
        bench.feed.push_on()
    assert bench.trainer.names() == ["p0"]


@settings(derandomize=True, deadline=None)
@given(
    consume=st.sampled_from(["stream", "batch"]),
    redundancy=st.integers(0, 1),
    actions=st.lists(
        st.sampled_from(["complete", "complete", "complete", "push", "push silently", "die", "back", "late push"])
    ),
)
def test_every_group_is_committed_once_whenever_the_trainer_dies(
    consume: Consume, redundancy: int, actions: list[str]
) -> None:
    bench = Bench(consume, redundancy=redundancy)
    down = False
    for action in actions:
        training = bool(bench.trainer.finished) and not down
        if action == "complete":
            bench.complete()
        elif action == "push" and training:
            check_batch(bench)
            assert bench.push()
            bench.feed.push_on()
        elif action == "push silently" and training:
            check_batch(bench)
            bench.trainer.version += 1
            assert bench.die()
            down = True
        elif action == "die" and not down:
            assert not bench.die()
            down = True
        elif action == "back" and down:
            bench.feed.back()
            bench.feed.push_on()
            down = False
        elif action == "late push":
            assert not bench.feed.pushed(bench.trainer.version)
        assert bench.ledger.version == bench.trainer.version
        assert len(bench.committed) == bench.ledger.version * bench.ledger.batch_size
        assert max(Counter(bench.committed).values(), default=1) == 1


def check_batch(bench: Bench) -> None:
    """What the trainer holds when it pushes is one whole step, each group once."""
    assert len(bench.trainer.fed) == len(set(bench.trainer.fed)) == bench.ledger.batch_size
    assert {step for step, _ in bench.trainer.fed} == {bench.ledger.version} == set(bench.trainer.finished)
    bench.trainer.fed, bench.trainer.finished = [], []
