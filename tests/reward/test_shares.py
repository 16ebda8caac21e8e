"""How many responses a worker is sent at once. A control plane that is patient hears what workers have answered, and
sends them more, once in a moment: that must not be what scoring takes."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from staleflow.reward.options import Reward
from staleflow.reward.pool import ANSWERED_S, MOST_AHEAD, MOST_QUICK, SLOWER, RewardPool
from staleflow.reward.process import Due, Worker
from staleflow.reward.wire import Answer, pack
from staleflow.tasks.task import Problem

PROBLEM = Problem("four", {})
MOMENT_S = 0.06


class Deaf:
    """A worker that has answered everything when it is next listened to."""

    def __init__(self) -> None:
        self.due: deque[Due] = deque()

    async def ready(self, timeout_s: float) -> None:
        pass

    async def end(self) -> None:
        pass

    def give(self, due: deque[Due], frame: bytes) -> None:
        assert frame
        self.due = due


class Moments(RewardPool):
    """A pool that hears its workers all at once, when it is told to."""

    def __init__(self, workers: int, response_s: float) -> None:
        self.scored: list[str] = []
        self.expected: list[float] = []
        heard = {"heard_s": MOMENT_S, "expect": self.expected.append}
        super().__init__(Reward(workers=workers), lambda name, *_: self.scored.append(name), lambda *_: None, **heard)
        self.response_s = response_s

    def _new(self) -> Worker:
        self._workers.add(worker := Deaf())  # type: ignore[arg-type]
        return worker  # type: ignore[return-value]

    @property
    def sent(self) -> list[int]:
        """How many each worker is busy with."""
        return sorted(len(each.due) for each in self._workers)

    async def submitted(self, count: int, name: str) -> None:
        for at in range(count):
            self.submit(f"{name}{at}", PROBLEM)
        await asyncio.sleep(0)  # they are dispatched together
        await asyncio.sleep(0)  # and workers started

    async def moment(self) -> None:
        for worker in [each for each in self._workers if each.due]:
            answered, worker.due = worker.due, deque()
            for due in answered:
                self.answered(due, Answer(due.job.number, 1.0, seconds=self.response_s))
            self.idle(worker)
        await asyncio.sleep(0)

    async def begun(self) -> Moments:
        """With all workers there, and one response after the other scored."""
        await self.start()
        await self.submitted(4 * self.options.workers, "first")
        while self.pending:
            await self.moment()
        assert len(self._workers) == self.options.workers
        return self


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_answers_that_will_be_there_soon_are_expected_then() -> None:
    """The last responses of a step were scored in a millisecond, and heard of a moment later."""

    async def main() -> None:
        pool = await Moments(2, 0.001).begun()
        pool.expected.clear()
        await pool.submitted(1, "a")
        await pool.moment()
        await pool.submitted(20, "b")  # ten for each worker
        await pool.moment()
        assert pool.expected == pytest.approx([ANSWERED_S + SLOWER * 0.001, ANSWERED_S + SLOWER * 0.01])
        await pool.submitted(1000, "c")
        assert len(pool.expected) == 2, "not before the moment's end"
        slow = await Moments(2, 0.5).begun()
        assert slow.expected == []

    run(main())


def test_quick_responses_do_not_wait_for_one_wake_up_of_the_control_plane_after_another() -> None:
    """All that bound 2 admits was generated at once: 768 responses of a tenth of a millisecond took 16 wake-ups."""

    async def main() -> None:
        pool = await Moments(workers=2, response_s=1e-4).begun()
        await pool.submitted(768, "burst")
        assert pool.sent == [MOST_QUICK, MOST_QUICK]
        for _ in range(2):
            await pool.moment()
        assert not pool.pending
        assert len(pool.scored) == len(set(pool.scored)) == 768 + 8

    run(main())


def test_the_last_quick_responses_are_not_halved_from_wake_up_to_wake_up() -> None:
    async def main() -> None:
        pool = await Moments(workers=2, response_s=1e-4).begun()
        await pool.submitted(27, "few")
        assert pool.sent == [13, 14]

    run(main())


def test_no_worker_is_sent_more_than_it_scores_until_it_is_heard() -> None:
    async def main() -> None:
        pool = await Moments(workers=2, response_s=MOMENT_S / 50).begun()
        await pool.submitted(768, "burst")
        assert all(49 <= each <= 50 for each in pool.sent)

    run(main())


def test_slow_responses_do_not_wait_behind_others_while_a_worker_has_nothing_to_do() -> None:
    async def main() -> None:
        pool = await Moments(workers=2, response_s=1.0).begun()
        await pool.submitted(4, "few")
        assert pool.sent == [1, 2]  # one is left for whoever is done first
        await pool.submitted(768, "burst")
        await pool.moment()
        assert pool.sent == [MOST_AHEAD, MOST_AHEAD]

    run(main())


def test_a_worker_that_nobody_hears_is_not_held_up_by_its_own_answers() -> None:
    with ExitStack() as held:
        ours, theirs = (held.enter_context(end) for end in socket.socketpair())
        theirs.setblocking(False)
        for number in range(MOST_QUICK):
            theirs.send(pack(Answer(number, 1.0, parts=(0.5, 0.5), seconds=1e-4)))  # BlockingIOError if it does not fit
        assert ours.recv(1)


@pytest.mark.processes
def test_workers_say_how_long_a_response_took(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, give = list[int](), Worker.give

    def noted(worker: Worker, due: deque[Due], frame: bytes) -> None:
        sent.append(len(due))
        give(worker, due, frame)

    monkeypatch.setattr(Worker, "give", noted)

    async def main() -> None:
        came, answers = asyncio.Event(), list[str]()

        def answered(name: str, *_: object) -> None:
            answers.append(name)
            came.set()

        pool = RewardPool(Reward("tests.reward.functions:behave"), answered, answered, heard_s=1e6)
        await pool.start()
        async with asyncio.timeout(20):
            for count in (1, 3 * MOST_AHEAD):
                for at in range(count):
                    pool.submit(f"{count}/{at}", PROBLEM, text="good")
                while pool.pending:
                    came.clear()
                    await came.wait()
            await pool.close()

    run(main())
    assert sent == [1, 3 * MOST_AHEAD]
