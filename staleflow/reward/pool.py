"""A bounded pool of reward workers, each a process of its own.

Every response that is submitted is answered once, by ``on_reward(name, reward)`` or ``on_failure(name, why)``, in the
event loop that started the pool. A worker that does not answer within ``timeout_s`` is killed with everything it
started, one that dies is replaced; either costs the response it was busy with one failure, and no other response
anything. Asking again is the control plane's business (``runtime/scoring.py``)::

    pool = RewardPool("my_module:reward", Settings(workers=2), on_reward, on_failure)
    await pool.start()                              # RewardError if the function cannot be loaded
    pool.submit("p0/0", problem, Response("42"))
    await pool.close()
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import IO

import msgspec

from staleflow.reward.function import Response, RewardError
from staleflow.reward.wire import HEAD, Answer, Job, pack, size, unpack
from staleflow.servers.lifecycle import Trajectory
from staleflow.tasks.task import Problem

Process = asyncio.subprocess.Process
MOST_AHEAD = 32
"""Responses that are sent to one worker before it has answered the first."""


@dataclass(frozen=True, slots=True)
class Settings:
    workers: int = 2
    timeout_s: float = 10.0
    """For one response. Keep it below the control plane's, which asks again."""
    start_timeout_s: float = 60.0
    """For a worker to import the reward function."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise RewardError(f"{self.workers} reward workers: have at least 1")
        if not (self.timeout_s > 0 and self.start_timeout_s > 0):
            raise RewardError(f"a reward time-out of {self.timeout_s} s: it must be above 0")


class RewardPool:
    def __init__(
        self,
        spec: str,
        settings: Settings,
        on_reward: Callable[[str, float], None],
        on_failure: Callable[[str, str], None],
        stderr: int | IO[bytes] | None = None,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.replaced = 0
        """Workers that were killed or died."""
        self._on_reward = on_reward
        self._on_failure = on_failure
        self._stderr = stderr
        self._numbers = count()
        self._asked: dict[str, Job] = {}
        self._queue: asyncio.Queue[tuple[str, Job]] = asyncio.Queue()
        self._serving: list[asyncio.Task[None]] = []

    @property
    def pending(self) -> int:
        """Responses that wait or are being scored."""
        return len(self._asked)

    async def start(self) -> None:
        """Start one worker, so that a function that cannot be loaded is known at once, then the others as needed."""
        first = await self._spawn()
        for process in (first, *[None] * (self.settings.workers - 1)):
            self._serving.append(asyncio.create_task(self._serve(process)))

    def submit(self, name: str, problem: Problem, response: Response) -> None:
        """Score it. A name that is asked for already is not asked for twice."""
        if name in self._asked:
            return
        job = Job(next(self._numbers), problem.prompt, response.text, response.tokens, dict(problem.facts))
        self._asked[name] = job
        self._queue.put_nowait((name, job))

    def withdraw(self, name: str) -> None:
        """Its score is not wanted any more: nobody will be called."""
        self._asked.pop(name, None)

    async def close(self) -> None:
        """Stop every worker. What was not scored stays unanswered."""
        self._asked.clear()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._serving.clear()

    # One worker's place in the pool

    async def _serve(self, process: Process | None) -> None:
        try:
            while True:
                due = await self._due()
                try:
                    process = process or await self._spawn()
                    self._send(process, due)
                    while due:
                        name, job = due[0]
                        self._answer(name, job, await self._hear(process, job))
                        due.popleft()
                except _WorkerLostError as lost:
                    process = await self._end(process)
                    self.replaced += 1
                    self._give_up(due, str(lost))
                except (RewardError, OSError) as error:
                    self._give_up(due, str(error))
        finally:
            await self._end(process)

    async def _due(self) -> deque[tuple[str, Job]]:
        """The next responses for one worker: its share of those that wait, so that they cost one system call."""
        due = deque([await self._queue.get()])
        most = min(MOST_AHEAD, 1 + self._queue.qsize() // self.settings.workers)
        while len(due) < most and not self._queue.empty():
            due.append(self._queue.get_nowait())
        return deque(each for each in due if self._asked.get(each[0]) is each[1])

    def _give_up(self, due: deque[tuple[str, Job]], why: str) -> None:
        """The first of them has failed; the others were only waiting behind it."""
        if due:
            name, job = due.popleft()
            self._answer(name, job, Answer(job.number, why=why))
        for each in due:
            self._queue.put_nowait(each)

    def _answer(self, name: str, job: Job, answer: Answer) -> None:
        if self._asked.get(name) is not job:
            return
        del self._asked[name]
        # Not called from here: an error of the listener must not stop this worker.
        loop = asyncio.get_running_loop()
        if answer.reward is None:
            loop.call_soon(self._on_failure, name, answer.why or "the reward worker gave no reason")
        else:
            loop.call_soon(self._on_reward, name, answer.reward)

    def _send(self, process: Process, due: deque[tuple[str, Job]]) -> None:
        """One that cannot be sent is answered here, and only the others go."""
        assert process.stdin is not None
        for name, job in list(due):
            try:
                process.stdin.write(pack(job))
            except (TypeError, ValueError, OverflowError) as error:
                why = f"the problem cannot be sent to a reward worker ({error}): keep to JSON values"
                self._answer(name, job, Answer(job.number, why=why))
                due.remove((name, job))

    async def _hear(self, process: Process, job: Job) -> Answer:
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                answer = await _answer_of(process)
        except TimeoutError:
            raise _WorkerLostError(f"the reward took more than {self.settings.timeout_s:g} s") from None
        if answer.number != job.number:
            raise _WorkerLostError(f"a reward worker answered {answer.number} and was asked {job.number}")
        return answer

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "staleflow.reward.worker", self.spec, str(self.settings.timeout_s)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._stderr,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # so that what the reward function starts can be killed with it
        )
        why = ""
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                why = (await _answer_of(process)).why
        except TimeoutError:
            why = f"reward {self.spec!r} was not loaded within {self.settings.start_timeout_s:g} s"
        except _WorkerLostError as lost:
            why = f"reward {self.spec!r} cannot be loaded: {lost}"
        except asyncio.CancelledError:
            await self._end(process)
            raise
        if why:
            await self._end(process)
            raise RewardError(why)
        return process

    async def _end(self, process: Process | None) -> None:
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


class PoolPort:
    """The pool as the control plane's ``RewardPort``: looks up what a trajectory is made of and submits it."""

    def __init__(
        self,
        pool: RewardPool,
        problem: Callable[[int], Problem],
        tokens: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._pool = pool
        self._problem = problem
        self._tokens = tokens
        self._decode = decode

    def score(self, trajectory: Trajectory) -> None:
        if trajectory.state != "generated":
            return  # its group was given up meanwhile
        tokens = tuple(int(token) for token in self._tokens(trajectory.name))
        problem = self._problem(trajectory.group.prompt)
        self._pool.submit(trajectory.name, problem, Response(self._decode(tokens), tokens))


class _WorkerLostError(Exception):
    """The worker is of no use any more."""


async def _answer_of(process: Process) -> Answer:
    assert process.stdout is not None
    try:
        head = await process.stdout.readexactly(HEAD)
        return unpack(await process.stdout.readexactly(size(head)), Answer)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise _WorkerLostError(f"the reward worker ended with exit code {await process.wait()}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise _WorkerLostError(f"the reward worker answered nonsense ({error})") from None
