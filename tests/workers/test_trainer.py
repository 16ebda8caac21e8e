"""The trainer as a process: what is fed in many messages is one step, and versions are out before anything else."""

import copy
import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleflow.frames import framed
from staleflow.runtime.local.link import SocketLink
from staleflow.training.checkpoints import load
from staleflow.training.checksums import damage
from staleflow.training.trainer import StalenessError, Trainer, TrainerOptions
from staleflow.types import (
    Broken,
    Feed,
    Finish,
    FromProcess,
    Moved,
    Pushed,
    Reset,
    Row,
    Save,
    Saved,
    Stop,
    ToProcess,
    Trained,
)
from staleflow.workers.trainer import TrainerWorker, serve
from tests.training.test_standby import kept, registry
from tests.training.test_trainer import base, groups_of

__all__ = ["base", "registry"]

OPTIONS = TrainerOptions(1, learning_rate=1e-2)


class Desk:
    """A worker, and everything that comes out of it in order."""

    def __init__(self, base: Any, **options: Any) -> None:
        self.out: list[Any] = []
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.trainer = Trainer(copy.deepcopy(base), OPTIONS)
        self.worker = TrainerWorker(self.trainer, self, self.hear, **options)

    def hear(self, message: Any) -> None:
        if not isinstance(message, Moved):  # signs of progress come at any time
            self.out.append(message)

    def push(self, version: int, tensors: Any) -> Any:
        assert version > self.newest()
        self.versions[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        self.out.append(("push", version))

    def newest(self) -> int:
        return max(self.versions, default=-1)

    def pull(self, into: Any, at_least: int) -> int:  # noqa: ARG002
        raise AssertionError("a trainer pushes and never pulls")

    def close(self) -> None: ...


def step(number: int = 0, count: int = 4, version: int | None = None) -> list[list[Row]]:
    return [list(group) for group in groups_of(count, 3, seed=number, version=number if version is None else version)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_feeds_that_gathered_make_the_update_of_one_feed_and_of_many(base: Any) -> None:
    together, gathered, apart = Desk(base), Desk(base), Desk(base)
    groups = step()
    together.worker.handle([Feed(0, groups), Finish(0)])
    gathered.worker.handle([*(Feed(0, [group]) for group in groups), Finish(0)])
    assert same(together.versions[1], gathered.versions[1])
    for group in groups:
        apart.worker.handle([Feed(0, [group])])
    apart.worker.handle([Finish(0)])
    assert all(
        torch.allclose(apart.versions[1][name].double(), tensor.double(), atol=1e-9)
        for name, tensor in together.versions[1].items()
    )


def test_what_is_packed_together_is_computed_at_once(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    desk = Desk(base)
    feed = desk.trainer.feed
    monkeypatch.setattr(desk.trainer, "feed", lambda step, groups, _: (fed.append(len(groups)), feed(step, groups)))
    groups = step()
    desk.worker.handle([Feed(0, groups[:1]), Feed(0, groups[1:3])])
    desk.worker.handle([Feed(0, groups[3:]), Finish(0)])
    assert fed == [3, 1]


def test_groups_of_the_next_step_behind_a_finish_are_not_mixed_into_this_one(base: Any) -> None:
    one, two = Desk(base), Desk(base)
    one.worker.handle([Feed(0, step(0)), Finish(0), Feed(1, step(1)), Finish(1), Stop()])
    for number in range(2):
        two.worker.handle([Feed(number, step(number))])
        two.worker.handle([Finish(number)])
    assert same(one.versions[2], two.versions[2])


def test_a_version_is_out_before_anything_is_said_of_it_and_its_facts_come_before_the_word(base: Any) -> None:
    desk = Desk(base)
    desk.worker.publish()
    assert desk.worker.handle([Feed(0, step()), Finish(0)])
    began, pushed, trained, said = desk.out
    assert (began, pushed, said) == (("push", 0), ("push", 1), Pushed(1))
    assert isinstance(trained, Trained)
    wanted = {"reward", "shaped_reward", "updates", "groups_without_signal", "tokens_without_signal", "clip_fraction"}
    assert wanted <= trained.facts.keys()
    assert (trained.facts["groups"], trained.facts["updates"]) == (4, 1)
    assert sum(trained.token_staleness.values()) == trained.facts["tokens"]
    assert all(isinstance(value, int | float) for value in trained.facts.values())


def test_what_another_trainer_published_is_not_published_again(base: Any) -> None:
    desk = Desk(base)
    desk.versions[0] = {}
    desk.worker.publish()
    assert desk.out == []


def test_engines_wait_for_the_weights_and_not_for_what_another_trainer_would_need(base: Any) -> None:
    desk = Desk(base)
    for call in ("note", "keep", "wait"):
        setattr(desk, call, lambda *_, call=call: desk.out.append(call))
    desk.worker = TrainerWorker(desk.trainer, desk, desk.hear, standby=desk)  # pyright: ignore[reportArgumentType]
    desk.worker.handle([Feed(0, step()), Finish(0)])
    note, wait, push, _, said, keep = desk.out
    assert (note, wait, push, said, keep) == ("note", "wait", ("push", 1), Pushed(1), "keep")
    assert desk.versions[1].keys() == desk.trainer.weights().keys()


def test_reset_forgets_what_was_fed(base: Any) -> None:
    interrupted, straight = Desk(base), Desk(base)
    interrupted.worker.handle([Feed(0, step(7, version=0)), Reset(), Feed(0, step()), Finish(0)])
    straight.worker.handle([Feed(0, step()), Finish(0)])
    assert same(interrupted.versions[1], straight.versions[1])
    assert interrupted.out[-2].facts == straight.out[-2].facts


def test_no_version_is_made_of_a_part_of_a_step(base: Any) -> None:
    """After a resume it was made of those groups only that came after the order to forget the ones before."""
    desk = Desk(base)
    groups = step()
    with pytest.raises(ValueError, match=rf"step 0 has {len(groups)} groups, the trainer was fed {len(groups) - 1}"):
        desk.worker.handle([Feed(0, groups[:1]), Reset(), Feed(0, groups[1:]), Finish(0, len(groups))])
    assert desk.trainer.version == 0


def test_a_checkpoint_of_the_version_asked_for_is_written_once_and_can_be_loaded(base: Any, tmp_path: Path) -> None:
    desk = Desk(base)
    folder = tmp_path / "checkpoints" / "a"
    save = Save(str(folder), {"control.bin": b"1"})
    desk.worker.handle([Feed(0, step(0)), Finish(0), save, Feed(1, step(1)), Finish(1), save])
    assert [each for each in desk.out if isinstance(each, Saved)] == [Saved(str(folder), 1), Saved(str(folder), 2)]
    assert (folder / "control.bin").read_bytes() == b"1"
    other = Desk(base)
    assert load(other.trainer, folder) == 1
    other.worker.handle([Feed(1, step(1)), Finish(1)])
    assert same(other.versions[2], desk.versions[2])


def test_a_checkpoint_that_another_attempt_left_is_not_taken_for_the_one_asked_for(base: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000001"
    before, after = Desk(base), Desk(base)
    before.worker.handle([Feed(0, step(0)), Finish(0), Save(str(folder), {"run.state": b"an earlier attempt"})])
    (folder / "run.state").unlink()
    after.worker.handle([Feed(0, step(0)), Finish(0), Save(str(folder), {"run.state": b"this attempt"})])
    assert (folder / "run.state").read_bytes() == b"this attempt"
    assert damage(folder) == ""


def test_a_trajectory_beyond_the_bound_breaks_the_run_by_name_and_changes_nothing(base: Any) -> None:
    ours, theirs = socket.socketpair()
    desk = Desk(base)
    link = SocketLink(theirs, ToProcess)
    desk.worker._send = link.send
    ours.sendall(b"".join(framed(each) for each in (Feed(0, step(0)), Finish(0), Feed(1, step(1)), Finish(1))))
    ours.sendall(b"".join(framed(each) for each in (Feed(2, step(2, version=0)), Finish(2), Stop())))
    with pytest.raises(StalenessError):
        serve(desk.worker, link)
    theirs.close()
    heard = []
    with ours:
        end = SocketLink(ours, FromProcess)
        while not heard or not isinstance(heard[-1], Broken):
            heard += end.receive(10)
    assert "trajectory p0/0 has" in heard[-1].why
    assert "of version 0, 2 steps old at step 2; the bound is 1" in heard[-1].why
    assert (desk.trainer.version, desk.newest()) == (2, 2)


def test_a_checkpoint_that_cannot_be_written_does_not_kill_the_trainer(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died of a full disk, was started again, saved again, and died again."""
    desk = Desk(base)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("staleflow.training.checkpoints.seal", full)
    assert desk.worker.handle([Save(str(tmp_path / "one"), {})])
    (said,) = desk.out
    assert "No space left" in said.why
    assert list(tmp_path.iterdir()) == [], "and what was written of it makes room again"
    monkeypatch.undo()
    assert desk.worker.handle([Save(str(tmp_path / "one"), {})])
    assert desk.out[-1] == Saved(str(tmp_path / "one"), 0)


def test_a_full_disk_is_waited_for_before_a_version_is_made_that_nobody_could_continue_from(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.workers.trainer.RETRY_S", 0.0)
    desk, said, tries = Desk(base), [], [2]

    def note(*_: Any) -> None:
        if tries[0]:
            tries[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")

    standby: Any = SimpleNamespace(note=note, keep=lambda *_: None, wait=lambda: None)
    worker = TrainerWorker(desk.trainer, desk, said.append, standby=standby)
    assert worker.handle([Feed(0, step()), Finish(0)])
    assert sum(isinstance(each, Moved) and "No space left" in each.why for each in said) == 2
    assert desk.newest() == 1


def test_the_facts_of_a_step_whose_trainer_died_before_it_told_them_are_told_by_the_next(base: Any) -> None:
    """Metrics, histograms and counts left out every step whose trainer died between its push and its word."""
    alive = Desk(base)
    alive.worker.handle([Feed(0, step()), Finish(0)])
    desk = Desk(base)
    desk.versions[1] = alive.versions[1]
    standby: Any = SimpleNamespace(
        newest=lambda: 0, revive=lambda _: 0, told=lambda _: None, noted=lambda _step, _kind: [step()]
    )
    assert TrainerWorker(desk.trainer, desk, desk.hear, standby=standby).revive()
    (told,) = (each for each in alive.out if isinstance(each, Trained))
    (again,) = desk.out
    assert (again.step, again.facts, again.token_staleness) == (told.step, told.facts, told.token_staleness)


def test_the_facts_of_a_step_that_nobody_heard_are_told_again_by_a_trainer_that_need_not_make_it(
    base: Any, registry: Path
) -> None:
    """The control plane was dead, and the trainer ended for new settings: the step had no line in the metrics."""
    alive = Desk(base, standby=(left := kept(registry)))
    alive.worker.publish()
    alive.worker.handle([Feed(0, step()), Finish(0)])
    left.wait()
    left.detach()
    desk = Desk(base, standby=(found := kept(registry, again=True)))
    desk.versions = alive.versions
    assert desk.worker.revive()
    assert desk.trainer.version == 1
    assert desk.out == [each for each in alive.out if isinstance(each, Trained)]
    found.close()


def test_a_trainer_that_comes_to_a_checkpoint_says_so_first(base: Any, tmp_path: Path) -> None:
    """Before that it is held to what its other work takes, and not to what the first checkpoint may."""
    said: list[Any] = []
    worker = TrainerWorker(Desk(base).trainer, Desk(base), said.append, save=lambda *_, **__: said.append("writes"))
    worker.handle([Save(str(tmp_path / "a"), {})])
    assert said[:2] == [Moved(0, saves=True), "writes"]


def test_one_that_has_nothing_left_to_do_says_so_once(base: Any) -> None:
    desk = Desk(base)
    said: list[Any] = []
    desk.worker = TrainerWorker(desk.trainer, desk, said.append)
    desk.worker.handle([Feed(0, step()[:2])])
    assert desk.worker.wait_s is not None
    desk.worker.handle([])
    assert said[-1] == Moved(1)
    assert desk.worker.wait_s is None
    before = len(said)
    desk.worker.handle([])
    assert len(said) == before
