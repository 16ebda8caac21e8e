"""The host of a worker under simulation: incarnations, pulls that take time, what is streamed when."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.engine import SimEngine
from staleflow.simulate.instance import Instance
from staleflow.simulate.rollout import SimRollout
from staleflow.simulate.setting import preset
from staleflow.simulate.weights import SimWeights
from staleflow.types import Drop, Fence, PullWeights, Report, Submit, Work
from staleflow.workers.rollout import STREAM_S

STEP = preset("paper-14b").rollout
LENGTH = 50


class Worker:
    """A worker alone, and everything it reported."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.weights = SimWeights(nbytes=1e9, link_bandwidth=1e9, total_bandwidth=1e12)
        self.reports: list[Report] = []
        engine = SimEngine(Instance(STEP, kv_blocks=1_000), lambda _: LENGTH, version=-1)
        self.rollout = SimRollout("i0", self.loop, engine, self.weights, self.reports.append)

    def run(self, script: Callable[[], None]) -> list[Report]:
        async def main() -> None:
            script()
            await asyncio.sleep(100.0)

        self.loop.run(main())
        return self.reports

    def finished(self) -> dict[str, tuple[tuple[int, int], ...]]:
        return {each.trajectory: each.spans for report in self.reports for each in report.finished}


def work(name: str, epoch: int = 1) -> list[Work]:
    return [Work(name, epoch, name, 64, ())]


def test_a_command_to_an_earlier_incarnation_is_ignored_and_does_not_take_the_number_of_a_new_one() -> None:
    worker = Worker()

    def script() -> None:
        worker.rollout.send(PullWeights(Fence(1, 0, 1), 0))
        worker.rollout.crash()
        worker.rollout.restart()
        worker.rollout.send(Submit(Fence(1, 0, 2), work("old")))
        worker.rollout.send(PullWeights(Fence(1, 1, 1), 0))
        worker.rollout.send(Submit(Fence(1, 1, 2), work("new")))

    worker.run(script)
    assert set(worker.finished()) == {"new"}


def test_a_pull_of_a_version_that_is_there_is_answered_or_the_control_plane_would_wait_forever() -> None:
    worker = Worker()

    def script() -> None:
        worker.rollout.send(PullWeights(Fence(1, 0, 1), 0))
        worker.loop.at(20.0, worker.rollout.send, PullWeights(Fence(2, 0, 1), 0))

    worker.run(script)
    assert [report.pulled for report in worker.reports] == [0, 0]


def test_a_version_asked_for_during_a_pull_is_loaded_before_another_token_is_made() -> None:
    worker = Worker()
    worker.weights.version = 2

    def script() -> None:
        worker.rollout.send(PullWeights(Fence(1, 0, 1), 1))
        worker.rollout.send(PullWeights(Fence(1, 0, 2), 2))
        worker.rollout.send(Submit(Fence(1, 0, 3), work("a")))

    worker.run(script)
    assert worker.finished() == {"a": ((2, LENGTH),)}


def test_a_trajectory_that_comes_again_before_the_first_has_left_is_kept_apart() -> None:
    worker = Worker()

    def script() -> None:
        worker.rollout.send(PullWeights(Fence(1, 0, 1), 0))
        worker.rollout.send(Submit(Fence(1, 0, 2), work("a", epoch=1)))
        worker.rollout.send(Drop(Fence(1, 0, 3), [("a", 1)]))
        worker.rollout.send(Submit(Fence(1, 0, 4), work("a", epoch=2)))

    worker.run(script)
    assert [(each.trajectory, each.epoch) for report in worker.reports for each in report.finished] == [("a", 2)]


def test_messages_wait_while_it_hangs_and_nothing_is_reported() -> None:
    worker = Worker()

    def script() -> None:
        worker.rollout.send(PullWeights(Fence(1, 0, 1), 0))
        worker.loop.at(5.0, worker.rollout.send, Submit(Fence(1, 0, 2), work("a")))
        worker.loop.at(5.1, worker.rollout.hang, 30.0)
        worker.loop.at(6.0, worker.rollout.send, Submit(Fence(1, 0, 3), work("b")))
        worker.loop.at(20.0, lambda: said.extend([len(worker.reports), worker.rollout.heard().time]))
        worker.loop.at(34.0, lambda: said.append(len(worker.reports)))

    said: list[float] = []
    worker.run(script)
    count, heard_at, later = said
    assert (count, heard_at) == (later, 5.1)
    assert set(worker.finished()) == {"a", "b"}


def test_a_pull_may_bring_a_newer_version_than_was_asked_for() -> None:
    worker = Worker()
    worker.weights.version = 3
    worker.run(lambda: worker.rollout.send(PullWeights(Fence(1, 0, 1), 1)))
    assert [report.pulled for report in worker.reports] == [3]


def test_tokens_carry_the_version_that_made_them_over_a_pull() -> None:
    worker = Worker()

    def script() -> None:
        worker.rollout.send(PullWeights(Fence(1, 0, 1), 0))
        worker.rollout.send(Submit(Fence(1, 0, 2), work("a")))
        worker.loop.at(1.2, lambda: setattr(worker.weights, "version", 1))
        worker.loop.at(1.3, worker.rollout.send, PullWeights(Fence(1, 0, 3), 1))

    worker.run(script)
    spans = worker.finished()["a"]
    assert [version for version, _ in spans] == [0, 1]
    assert sum(count for _, count in spans) == LENGTH


def test_when_a_version_is_published_the_server_knows_how_large_everything_is() -> None:
    """Levelling needs it right then; contexts of the last pull would be a whole step old."""
    setting = replace(preset("paper-14b"), instances=4, training_gpus=4, groups=8, group_size=4, steps=4, staleness=2)
    cluster = Cluster(setting, seed=3)
    announce, behind = cluster.control.on_pushed, list[int]()

    def pushed(version: int) -> None:
        now = cluster.loop.now
        for rollout in cluster.rollouts:
            for name, _ in rollout.held():
                generated = rollout.engine.instance.generated(rollout.engine._held[name].name, now)
                behind.append(generated - cluster.control.server.trajectories[name].generated)
        announce(version)

    cluster.control.on_pushed = pushed  # type: ignore[method-assign]
    cluster.run()
    assert len(behind) > 20
    assert max(behind) <= STREAM_S / setting.rollout.floor, "no more than were made since the last stream"


def test_what_was_sent_within_the_moment_does_not_seem_to_wait_for_memory() -> None:
    worker, rollout = (one := Worker()), one.rollout
    seen: list[int] = []

    def in_a_step() -> None:
        rollout.heard()
        rollout.send(Submit(Fence(1, 0, 3), work("second")))
        seen.append(rollout.heard().state.waiting)

    def script() -> None:
        rollout.send(PullWeights(Fence(1, 0, 1), 0))
        rollout.send(Submit(Fence(1, 0, 2), work("first")))
        worker.loop.at(1.5, in_a_step)
        worker.loop.at(3.0, lambda: seen.append(rollout.heard().applied.number))

    worker.run(script)
    assert seen == [0, 3], "it is counted as a command on top of what was heard, and seen later"
