"""Where instances compute on the trainer's GPU, groups wait for others of their step: through ledger, feed, wire,
worker and trainer, whatever comes when and whoever dies, each is computed once, and none waits for nothing."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.runtime.feed import TrainerFeed
from staleflow.runtime.local.remote import RemoteTrainer
from staleflow.runtime.watchdog import Watchdog
from staleflow.servers.lifecycle import Group
from staleflow.training import gathering
from staleflow.training.packed import LossSum
from staleflow.training.pieces import Sizes
from staleflow.training.sharded import ShardedTrainer
from staleflow.training.trainer import Trainer, TrainerOptions
from staleflow.types import Feed, Finish, Moved, Pushed, Row
from staleflow.workers import trainer as module
from staleflow.workers.sharded import LeadingTrainer
from staleflow.workers.trainer import LOOK_S, SAY_S, TrainerWorker
from tests.servers.small_server import admitted, empty_server, finish
from tests.training.test_pieces import groups_of as alike
from tests.training.test_trainer import BusyClock, base, tiny
from tests.workers.test_trainer import OPTIONS, Desk, step

__all__ = ["base"]

MODEL = tiny()
SHARING = replace(OPTIONS, shares_gpu=True)


class Noting(Trainer):
    """Notes the groups of the step instead of computing them."""

    def __init__(self, options: TrainerOptions, version: int) -> None:
        self.computed: list[str] = []
        self.device_clock = BusyClock()
        self.device_clock.busy = False
        super().__init__(MODEL, options, version)
        self._clock = cast("Any", self.device_clock)

    def _accumulate(self, work: Any) -> LossSum:
        self.computed += [group[0].name.split("/")[0] for group in work.groups]
        return LossSum.zero(self._aggregation, self.device)

    def reset(self) -> None:
        self.computed = []
        super().reset()
        self._clock = cast("Any", self.device_clock)


class Life:
    """A control plane's side of training, and the trainer that it talks to; messages lie in between."""

    def __init__(self, batch: int, staleness: int, redundancy: int, consume: Any, micro_tokens: int) -> None:
        self.server, _ = empty_server(batch, staleness, redundancy)
        self.ledger = self.server.ledger
        cast("Any", self.server).rows = rows_of
        self.server.on_committed = lambda _, groups: self.committed.extend(group.name for group in groups)
        self.committed: list[str] = []
        self.options = TrainerOptions(staleness, micro_tokens=micro_tokens, shares_gpu=True, skip_no_signal=False)
        self.sent: list[Any] = []
        self.said: list[Any] = []
        self.version = 0
        """The newest that was published."""
        self.open: list[Group] = []
        """Groups that are being generated."""
        self.port = RemoteTrainer(self._crew(), self.server)
        self.feed = TrainerFeed(self.server, self.port, consume, lambda _: None)
        self._begin()
        self.port.reset()

    # What the worker asks of a parameter server

    def push(self, version: int, _: Any) -> None:
        self.version = version

    def newest(self) -> int:
        return self.version

    # What may happen

    def complete(self, which: int = 0, dropped: bool = False) -> None:
        while self.ledger.room(self.ledger.version) and (new := admitted(self.server)):
            self.open += new
            assert all(self.server.place(each.name, "i0", self.ledger.version) for each in new[0].members)
        if self.open:
            group = self.open.pop(which % len(self.open))
            if group.name in self.server.groups:
                for each in group.members:
                    assert self.server.generated(each.name, each.epoch, (*each.spans, (cast("int", group.version), 10)))
                    self.server.score(each.name, 1.0)
                if dropped:
                    self.server.release(group, "no signal", True)
                self.feed.push_on()

    def deliver(self, count: int) -> None:
        """So many messages together."""
        messages, self.sent[:] = self.sent[:count], self.sent[count:]
        if any(isinstance(each, Finish) for each in messages):
            leased, whole = set(self.server.leased), self.ledger.batch_size
            done = self.trainer.finish

            def finished(step: int) -> Any:
                self.trainer.flush()
                assert len(self.trainer.computed) == whole
                assert set(self.trainer.computed) == leased
                return done(step)

            cast("Any", self.trainer).finish = finished
        self.worker.handle(messages)
        self.trainer.__dict__.pop("finish", None)
        self.trainer.advance()

    def hear(self) -> None:
        while self.said:
            if isinstance(message := self.said.pop(0), Pushed):
                self.port.made(message.version)
                if self.feed.pushed(message.version):
                    self.feed.push_on()

    def die(self) -> None:
        """With everything that was on its way."""
        self.sent.clear()
        self.said.clear()
        self.port._crew = self._crew()
        self._begin()
        self.port.made(self.version)
        self.feed.lost()
        self.feed.back()
        self.feed.push_on()

    def check(self) -> None:
        if self.sent or not self.trainer.waiting:
            return
        if self.trainer.due:
            assert self.worker.wait_s == LOOK_S
        else:
            assert self.trainer._open.missing == self.ledger.batch_size - self.ledger.taken > 0
            assert self.worker.wait_s in (SAY_S, None)

    def _begin(self) -> None:
        self.trainer = Noting(self.options, self.version)
        self.worker = TrainerWorker(self.trainer, cast("Any", self), self.said.append)

    def _crew(self) -> Any:
        child = SimpleNamespace(ready=asyncio.Event(), send=self.sent.append)
        child.ready.set()
        return SimpleNamespace(children={"trainer": child})


def rows_of(groups: Sequence[Group]) -> list[Row]:
    return [
        Row.of(
            f"{group.name}/{at}",
            np.arange(3),
            np.arange(4),
            np.full(4, -1.0),
            ((cast("int", group.version), 4),),
            float(at % 2),
        )
        for group in groups
        for at in range(2)
    ]


EVENTS: dict[str, Callable[[Life, int], object]] = {
    "complete": lambda life, how: life.complete(how),
    "drop": lambda life, how: life.complete(how, dropped=True),
    "deliver": lambda life, how: life.deliver(1 + how),
    "idle": lambda life, _: life.worker.handle([]),
    "hear": lambda life, _: life.hear(),
    "busy": lambda life, how: setattr(life.trainer.device_clock, "busy", how % 2 == 1),
    "die": lambda life, how: life.die() if how == 0 else None,
}
OFTEN = [*EVENTS, *["complete"] * 5, *["deliver"] * 3]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(OFTEN), st.integers(0, 7)), max_size=60),
    st.integers(1, 6),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(["stream", "batch"]),
    st.sampled_from([30, 100, 10**6]),
    st.sampled_from([1, 25, 10**6]),
)
def test_every_group_is_computed_once_and_none_waits_for_nothing(
    events: list[tuple[str, int]],
    batch: int,
    staleness: int,
    redundancy: int,
    consume: str,
    micro_tokens: int,
    worth: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "WORTH_A_PASS", worth)
        life = Life(batch, staleness, min(redundancy, batch - 1), consume, micro_tokens)
        for event, how in events:
            EVENTS[event](life, how)
            life.check()
        life.trainer.device_clock.busy = False
        wanted = life.ledger.version + 2
        for _ in range(200):
            life.deliver(100)
            life.hear()
            life.check()
            life.complete()
            if life.ledger.version >= wanted:
                break
        assert life.ledger.version >= wanted
        assert len(life.committed) == len(set(life.committed)) == batch * life.ledger.version


@pytest.mark.parametrize("measured", [False, True])
def test_one_that_is_fed_without_a_pause_and_gathers_does_not_stand_still(
    base: Any, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said nothing while groups came, and was killed for that after half a minute."""
    now, watchdog, sent, found = 0.0, Watchdog(), 0, list[Any]()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))

    def heard(message: Any) -> None:
        watchdog.moved("trainer", now)
        if isinstance(message, Moved) and message.handled >= sent:
            watchdog.done("trainer", "feed", now)

    def told(message: Any, tokens: int) -> None:
        nonlocal sent
        watchdog.asked("trainer", "feed", "gradients", now, tokens)
        sent += 1
        worker.handle([message])

    trainer = Trainer(copy.deepcopy(base), replace(SHARING, micro_tokens=16_384))
    worker = TrainerWorker(trainer, Desk(base), heard)
    if measured:
        told(Feed(0, step(0, 200)), 200 * 20)
        now += 0.5
        told(Finish(0), 0)
        watchdog.done("trainer", "feed", now)
    for at, group in enumerate(step(trainer.version, 200)):
        now += 0.4
        found += watchdog.look(now)
        told(Feed(trainer.version, [group], missing=199 - at), 20)
    assert found == []


def test_of_groups_that_came_together_the_last_says_how_many_are_still_to_come(base: Any) -> None:
    desk, groups = Desk(base), step()
    trainer = Trainer(copy.deepcopy(base), SHARING)
    worker = TrainerWorker(trainer, desk, desk.hear)
    worker.handle([Feed(0, groups[:1], missing=3), Feed(0, groups[1:], missing=0)])
    assert not trainer.waiting


def test_one_whose_groups_wait_for_others_does_not_look_after_them(base: Any) -> None:
    """It looked for work every millisecond of a step, on a core that others need."""
    desk, said, groups = Desk(base), list[Any](), step()
    trainer = Trainer(copy.deepcopy(base), SHARING)
    worker = TrainerWorker(trainer, desk, said.append)
    worker.handle([Feed(0, groups[:1], missing=3)])
    assert trainer.waiting
    assert worker.wait_s == SAY_S
    worker.handle([])
    assert (said[-1], worker.wait_s) == (Moved(1), None)
    worker.handle([Feed(0, groups[1:], missing=0)])
    assert not trainer.waiting
    worker.handle([Finish(0, len(groups))])
    assert desk.newest() == 1


def test_one_whose_groups_wait_for_the_device_does_not_say_that_it_is_done(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, clock = list[Any](), BusyClock()
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    monkeypatch.setattr(trainer, "_clock", clock)
    worker = TrainerWorker(trainer, Desk(base), said.append)
    worker.handle([Feed(0, step()[:1], missing=3)])
    said.clear()
    worker.handle([])
    assert (said, worker.wait_s) == ([], LOOK_S)
    clock.busy = False
    trainer.advance()
    worker.handle([])
    assert said[-1] == Moved(1)


def test_a_trainer_with_a_gpu_of_its_own_waits_for_no_other_groups(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    trainer.feed(0, step()[:1], missing=3)
    assert not trainer.waiting


def test_what_rows_share_does_not_fill_a_pass_twice_and_every_rank_has_one(base: Any) -> None:
    groups = alike([(9, [2] * 4)])
    rows = [row for group in groups for row in group]
    shared, whole = Sizes.of(rows).total, Sizes.of(rows, share=False).total
    assert shared < whole
    for most, ranks, waits in ((whole, 1, True), (shared + 1, 1, True), (shared, 1, False), (shared, 2, True)):
        trainer = Trainer(copy.deepcopy(base), TrainerOptions(0, shares_gpu=True, micro_tokens=most, ranks=ranks))
        trainer.feed(0, groups, missing=3)
        assert trainer.waiting == waits


def test_what_gathered_is_forgotten_with_the_step(base: Any) -> None:
    """A trainer that is fed a step again would train on some of its groups twice."""
    trainer, other, groups = Trainer(copy.deepcopy(base), SHARING), Trainer(copy.deepcopy(base), OPTIONS), step()
    trainer.feed(0, groups[:2], missing=2)
    trainer.reset()
    assert not trainer.waiting
    assert (trainer._open.tokens, trainer._open.missing) == (0, 0)
    for each in (trainer, other):
        each.feed(0, groups)
        assert each.finish(0).groups == 4
    assert all(one.equal(two) for one, two in zip(trainer.parameters, other.parameters, strict=True))


def test_the_first_of_several_ranks_hears_how_many_groups_are_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others need not know: they begin when it does."""
    told, fed = list[Any](), list[Any]()
    monkeypatch.setattr(ShardedTrainer, "feed", lambda _, *given: fed.append(given))
    trainer = object.__new__(LeadingTrainer)
    trainer._team = SimpleNamespace(tell=told.append)  # type: ignore[assignment]
    groups = step()[:1]
    trainer.feed(0, groups, 3)
    assert fed == [(0, groups, 3)]
    assert told == [Feed(0, groups)]


@pytest.mark.parametrize(("redundancy", "missing"), [(0, [2, 1, 0]), (1, [2, 1, 0])])
def test_a_trainer_is_told_how_many_groups_of_its_step_are_still_to_come(
    redundancy: int, missing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that redundancy admitted are not waited for."""
    sent = list[Any]()
    child = SimpleNamespace(ready=asyncio.Event(), send=sent.append)
    child.ready.set()
    server, _ = empty_server(batch=3, staleness=1, redundancy=redundancy)
    monkeypatch.setattr(server, "rows", lambda _: list[Any]())
    trainer = RemoteTrainer(cast("Any", SimpleNamespace(children={"trainer": child})), server, version=0)
    trainer.reset()
    feed = TrainerFeed(server, trainer, "stream", lambda _: None)
    for group in admitted(server, 3 + redundancy)[:3]:
        finish(server, group)
        feed.push_on()
    fed = [each for each in sent if isinstance(each, Feed)]
    assert [(each.step, len(each.groups), each.missing) for each in fed] == [(0, 1, left) for left in missing]
    assert isinstance(sent[-1], Finish)
