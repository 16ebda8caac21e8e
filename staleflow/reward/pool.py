"""A bounded pool of reward workers, each a process of its own.

Every submitted response is answered once, by ``on_reward(name, reward, parts)`` or ``on_failure(name, why)``, in the
event loop that started the pool; ``parts`` has each reward where there are several. A worker that does not answer
within ``timeout_s`` is killed with everything it started, one that dies is replaced; either is one failure for the
response it was busy with, and affects no other response. Retries are up to the control plane
(``runtime/scoring.py``), except where a service is away: then no response has failed, and all wait, longer each time,
until it answers or ``patience_s`` have passed::

    pool = RewardPool(Reward("my_module:reward", workers=2), on_reward, on_failure, decoder="tokenizer.json")
    await pool.start()                              # RewardError if the function cannot be loaded
    pool.submit("p0/0", problem, tokens)            # the worker decodes them
    await pool.close()
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from staleflow.reward.forks import connect, own_functions
from staleflow.reward.function import RewardError
from staleflow.reward.options import Reward
from staleflow.reward.process import Due, Worker, started
from staleflow.reward.wire import Answer, Job, pack
from staleflow.servers.lifecycle import Trajectory
from staleflow.tasks.task import Problem

MOST_AHEAD = 32
"""Responses that are sent to one worker before it has answered the first, unless they are quick."""
MOST_QUICK = 256
"""Of those that are: more answers than these do not fit into a socket that nobody reads."""
RECENT = 0.1
"""Weight of the latest response in how long one takes."""
MOST_BYTES_AHEAD = 1 << 24
"""Beyond this no more are added to a message: rows may be large."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
"""Between two attempts to reach a service that is away."""
ANSWERED_S, SLOWER = 0.002, 1.25
"""A share is answered after this time and so many times what its responses took lately."""
START_TIMEOUT_S = 60.0
"""Time limit for a worker to import the reward function."""


class RewardPool:
    def __init__(
        self,
        options: Reward,
        on_reward: Callable[[str, float, tuple[float, ...]], None],
        on_failure: Callable[[str, str], None],
        stderr: int | None = None,
        decoder: str = "",
        on_away: Callable[[str], None] = lambda _: None,
        on_lost: Callable[[str], None] = lambda _: None,
        heard_s: float = 0.0,
        expect: Callable[[float], None] = lambda _: None,
    ) -> None:
        """``decoder``: how workers decode tokens (``load_decoder`` in worker.py); "" if they do not. ``on_away`` is
        called with the reason whenever a service that is away was asked in vain, ``on_lost`` whenever a worker died or
        was killed. ``heard_s``: how long it may be until the event loop hears what a worker has answered; ``expect`` is
        called with the seconds until what workers were just given is answered, if that is less."""
        self.options = options
        self._on_reward = on_reward
        self._on_failure = on_failure
        self._on_away = on_away
        self._on_lost = on_lost
        self._away_since: float | None = None
        """When a service was first found away, if none has answered since."""
        self._pause: asyncio.TimerHandle | None = None
        self._pause_s = FIRST_PAUSE_S
        self._answers = 0
        """Rewards so far."""
        self._held: dict[str, int] = {}
        """By response that found the service away: how many answers there had been."""
        self.heard_s = heard_s
        self.expect = expect
        self._response_s = 0.0
        """That a response takes a worker; 0 before the first."""
        self._stderr = stderr
        self._decoder = decoder
        self._numbers = count()
        self._asked: dict[str, Job] = {}
        self._queue: deque[Due] = deque()
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        """All workers that are running or being started, at most ``options.workers``."""
        self._changes: set[asyncio.Task[None]] = set()
        """Tasks that start or end a worker."""
        self._dispatching = False

    @property
    def away_s(self) -> float:
        """How long a service has been away."""
        return 0.0 if self._away_since is None else asyncio.get_running_loop().time() - self._away_since

    @property
    def pending(self) -> int:
        """Responses that wait or are being scored."""
        return len(self._asked)

    async def start(self) -> None:
        """Start one worker, to learn at once if the function cannot be loaded; the others start as needed."""
        await self._start(self._new())

    def submit(self, name: str, problem: Problem, tokens: bytes = b"", text: str = "", cut: bool = False) -> None:
        """Score the response with these tokens (little-endian int32). Where workers have no decoder, ``text`` is its
        text. A name that is pending already is ignored."""
        if name in self._asked:
            return
        prompt = list(problem.prompt) if isinstance(problem.prompt, tuple) else problem.prompt
        job = self._asked[name] = Job(next(self._numbers), prompt, dict(problem.facts), tokens, text, cut)
        self._queue.append(Due(name, job))
        if not self._dispatching:
            self._soon()

    async def close(self) -> None:
        """Stop every worker. What was not scored stays unanswered."""
        self._asked.clear()
        self._queue.clear()
        self._held.clear()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for task in self._changes:
            task.cancel()
        await asyncio.gather(*self._changes, *(worker.end() for worker in self._workers), return_exceptions=True)
        self._workers.clear()
        self._idle.clear()

    # What workers report

    def answered(self, due: Due, answer: Answer) -> None:
        name, job = due
        if answer.seconds:
            self._response_s += (RECENT if self._response_s else 1.0) * (answer.seconds - self._response_s)
        if self._asked.get(name) is not job:
            return
        if answer.away and self._hold(due, answer.why):
            return
        del self._asked[name]
        self._held.pop(name, None)
        if answer.reward is not None:
            self._answers += 1
            self._away_since, self._pause_s = None, FIRST_PAUSE_S
        try:
            if answer.reward is None:
                self._on_failure(name, answer.why or "the reward worker gave no reason")
            else:
                self._on_reward(name, answer.reward, answer.parts)
        except Exception as error:  # the callback must not stop the worker
            context = {"message": f"the callback for the reward of {name} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def idle(self, worker: Worker) -> None:
        self._idle.append(worker)
        if self._queue:
            self._dispatch()

    def lost(self, worker: Worker, why: str) -> None:
        if worker in self._idle:  # or it would get the next responses, and nobody would notice that it does not answer
            self._idle.remove(worker)
        self._change(self._replace(worker, why))

    # Within

    def _hold(self, due: Due, why: str) -> bool:
        """The service that the reward needs is away. Whether the response waits for it, and is not to blame: it is if
        others were answered meanwhile."""
        if self._held.setdefault(due.name, self._answers) < self._answers:
            return False
        loop = asyncio.get_running_loop()
        if self._away_since is None:
            self._away_since = loop.time()
        if self.away_s >= self.options.patience_s:
            return False
        self._queue.append(due)
        if self._pause is None:
            self._pause = loop.call_later(self._pause_s, self._resume)
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
            self._on_away(why)
        return True

    def _resume(self) -> None:
        self._pause = None
        self._dispatch()

    def _soon(self) -> None:
        """Dispatch later in this turn of the event loop, so that responses submitted together are sent together."""
        self._dispatching = True
        asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        if self._pause is not None:
            return
        most = 0
        while self._queue and self._idle:
            due = self._next()
            if frame := self._frame(due):
                self._idle.pop().give(due, frame)
                most = max(most, len(due))
        if most and self._response_s and (soon := ANSWERED_S + SLOWER * most * self._response_s) < self.heard_s:
            self.expect(soon)
        if self._queue and len(self._workers) < self.options.workers:
            try:
                self._change(self._add(self._new()))
            except OSError as error:
                self._give_up(self._next(), f"no reward worker could be started ({error})")

    def _next(self) -> deque[Due]:
        """The next responses for one worker: its share of those that wait, to be sent in one system call. A worker that
        has answered all of them does nothing until that is heard, so it gets as many as it can score meanwhile: small
        shares, which leave the rest to whoever is done first, are for responses that take longer."""
        waiting = len(self._queue)
        share = min(MOST_AHEAD, 1 + (waiting - 1) // self.options.workers)
        quick = min(MOST_QUICK, int(self.heard_s / self._response_s)) if self._response_s else 0
        even = -(-waiting // max(1, len(self._idle)))
        taken = [self._queue.popleft() for _ in range(max(share, min(quick, even)))]
        return deque([each for each in taken if self._asked.get(each.name) is each.job])

    def _frame(self, due: deque[Due]) -> bytes:
        """Their jobs in one message, or in one each where that cannot be: a job that cannot be sent fails here and
        leaves ``due``; jobs beyond ``MOST_BYTES_AHEAD`` go back to the queue."""
        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            if len(frame := pack([each.job for each in due])) < MOST_BYTES_AHEAD:
                return frame
        frames: list[bytes] = []
        size = 0
        for each in list(due):
            if size >= MOST_BYTES_AHEAD:
                break
            try:
                frames.append(pack([each.job]))
                size += len(frames[-1])
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                due.remove(each)
                why = (
                    f"the row of prompt {str(each.job.prompt)[:40]!r} cannot be sent to a reward worker ({error}): "
                    "keep to JSON values, and large columns out"
                )
                self.answered(each, Answer(each.job.number, why=why))
        while len(due) > len(frames):
            self._queue.appendleft(due.pop())
        return b"".join(frames)

    def _give_up(self, due: deque[Due], why: str) -> None:
        """The first of them has failed; the others were waiting behind it and are queued again."""
        if due:
            failed = due.popleft()
            self.answered(failed, Answer(failed.job.number, why=why))
        self._queue.extend(due)
        if self._queue and not self._dispatching:
            self._soon()

    def _change(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    def _new(self) -> Worker:
        if (program := own_functions(self.options)) is not None:
            connection, process = connect(program, self.options, self._decoder, self._stderr), None
        else:
            options = msgspec.json.encode(self.options).decode()
            command = (sys.executable, "-m", "staleflow.reward.worker", options, self._decoder)
            connection, process = started(command, self._stderr, self.options.environment)
        worker = Worker(connection, process, self.options.timeout_s, self)
        self._workers.add(worker)
        return worker

    async def _start(self, worker: Worker) -> None:
        try:
            await worker.ready(START_TIMEOUT_S)
        except RewardError as error:
            await worker.end()
            self._workers.discard(worker)
            raise RewardError(f"reward {', '.join(self.options.functions)!r}: {error}") from None
        self.idle(worker)

    async def _add(self, worker: Worker) -> None:
        """Start one more worker. If that fails, so does the first response that waits for it."""
        try:
            await self._start(worker)
        except RewardError as error:
            self._give_up(self._next(), str(error))

    async def _replace(self, worker: Worker, why: str) -> None:
        why = why or await worker.last_words()
        await worker.end()
        self._workers.discard(worker)
        self._on_lost(why)
        self._give_up(worker.due, why)


class PoolPort:
    """The pool as the control plane's ``RewardPort``: looks up a trajectory's problem and tokens and submits them."""

    def __init__(
        self,
        pool: RewardPool,
        problem: Callable[[int], Problem],
        bytes_of: Callable[[str], tuple[bytes, bytes]],
        cut: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """``bytes_of``: the token ids of a trajectory, by name, as little-endian int32, and its log-probabilities;
        ``cut``: whether a length limit ended it."""
        self._pool = pool
        self._cut = cut
        self._problem = problem
        self._bytes_of = bytes_of

    def score(self, trajectory: Trajectory) -> None:
        if trajectory.state != "generated":
            return  # its group was given up meanwhile
        name, (tokens, _) = trajectory.name, self._bytes_of(trajectory.name)
        self._pool.submit(name, self._problem(trajectory.group.prompt), tokens, cut=self._cut(tokens))
