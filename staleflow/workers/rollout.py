"""A rollout instance: an engine, the order of its commands, and what it has not reported yet.

``RolloutWorker`` knows nothing of sockets, clocks or processes. A host drives it: ``serve`` in a process with a link,
``SimRollout`` under the virtual clock. Both run what is here::

    worker = RolloutWorker("i0", engine, weights, Requests(sampling, seed=0))
    worker.hear(Submit(Fence(1, 0, 1), [work]))
    worker.step()
    report = worker.report()                  # None if there is nothing to report

*Commands* to this incarnation are applied in order and without gaps: early ones wait, repeated and late ones are
dropped, and so are those of an earlier term of the control plane once a later one is known. A ``PullWeights`` holds
back the commands behind it until the host has called ``pull``.

*The engine* keeps tokens and versions; the worker only keeps how much of each trajectory has been reported. Finished
trajectories are reported a moment later, together with the next ones; tokens of the others every two seconds. The
report of a pull includes all trajectories that have begun and were never reported: the control plane must not take a
group for untouched that has tokens of an older version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from staleflow.rollout.engine import Engine, Request, Result, Sampling, StepOutput, WeightSource
from staleflow.tasks.task import digest
from staleflow.types import (
    LOGPROB,
    TOKEN,
    Chunk,
    Command,
    Costs,
    Drop,
    Failed,
    Fence,
    PullWeights,
    Report,
    Return,
    Spans,
    Stop,
    Submit,
    TakeOver,
    TrajectoryNews,
    Work,
    token_count,
)
from staleflow.workers.link import Gone, Link
from staleflow.workers.meter import Meter

TICK_S = 0.06
"""A busy instance reports at most once between two ticks, the multiples of this time by the machine's clock: what
finishes meanwhile is reported together, and all instances report at about the same time."""
STREAM_S = 2.0
"""How often the tokens of unfinished trajectories are reported: a crash loses only younger ones."""
STREAMING = 1024
"""Instances that report them as often as that. More of them report as much as these, all together: it is what fills the
core of a control plane first. That they are alive, and how full, all of them say as often as before."""
LONGEST_STREAM_S = 20.0
IDLE_S = 2.0
"""How often an instance without work reports that it is alive."""
NO_COSTS = Costs()


@dataclass(slots=True)
class _Held:
    """A trajectory in the engine."""

    epoch: int
    reported: int
    """Tokens that the control plane knows."""
    turn: bool = False
    """Whether it is asked why it ended."""


class RolloutWorker:
    def __init__(
        self,
        name: str,
        engine: Engine,
        weights: WeightSource,
        request_of: Callable[[Work], Request],
        incarnation: int = 0,
        before_pull: Callable[[int], object] = lambda _: None,
    ) -> None:
        """``before_pull`` gets the version that is to be pulled, and may wait for it."""
        self.name = name
        self.engine = engine
        self.applied = Fence(0, incarnation, 0)
        """The latest command that was applied."""
        self.pulling: int | None = None
        """The version to load: the host must call ``pull`` before any later command is applied."""
        self._weights = weights
        self._request_of = request_of
        self._before_pull = before_pull
        self._early: dict[Fence, Command] = {}
        self._held: dict[str, _Held] = {}
        self._finished: list[TrajectoryNews] = []
        self._returned: list[TrajectoryNews] = []
        self._failed: list[Failed] = []
        self._pulled: int | None = None

    @property
    def urgent(self) -> bool:
        """Whether there is news that the control plane waits for."""
        return bool(self._finished or self._returned or self._failed) or self._pulled is not None

    def held(self) -> list[tuple[str, int]]:
        """The trajectories (name, epoch) that are here."""
        return [(name, held.epoch) for name, held in self._held.items()]

    # Commands

    def hear(self, command: Command) -> None:
        """Take a command. It may come late, twice or out of order: it is kept until its turn."""
        fence, applied = command.fence, self.applied
        if fence.incarnation != applied.incarnation or fence <= applied:
            return
        self.take_over(fence.term)
        self._early[fence] = command
        self._obey()

    def take_over(self, term: int) -> None:
        """A control plane of this term is there: nothing that an earlier one has said is applied any more."""
        if term > self.applied.term:
            self.applied = Fence(term, self.applied.incarnation, 0)
            self._early = {each: early for each, early in self._early.items() if each.term >= term}

    def pull(self) -> None:
        """Load the requested version, or a newer one, and apply the commands behind it."""
        assert self.pulling is not None
        self._before_pull(self.pulling)
        self._pulled = self.engine.pull(self._weights, self.pulling)
        self.pulling = None
        self._obey()

    def _obey(self) -> None:
        term, incarnation, number = self.applied
        while self.pulling is None and (command := self._early.pop(Fence(term, incarnation, number + 1), None)):
            number += 1
            self.applied = command.fence
            match command:
                case Submit(work=work):
                    self._abort([each.trajectory for each in work if each.trajectory in self._held])
                    for each in work:
                        self._held[each.trajectory] = _Held(each.epoch, token_count(each.spans), each.limit > 0)
                    self.engine.submit([self._request_of(each) for each in work])
                case Return(names=names):
                    self.engine.interrupt([name for name, epoch in names if self._holds(name, epoch)])
                case Drop(names=names):
                    self._abort([name for name, epoch in names if self._holds(name, epoch)])
                case PullWeights(version=version):
                    self.pulling = version

    def _abort(self, names: list[str]) -> None:
        self.engine.abort(names)
        for name in names:
            del self._held[name]

    def _holds(self, name: str, epoch: int) -> bool:
        return name in self._held and self._held[name].epoch == epoch

    # Steps and reports

    def step(self) -> StepOutput:
        """One step of the engine."""
        output = self.engine.step()
        if output.finished:
            self._finished += self._left(output.finished)
        if output.returned:
            self._returned += self._left(output.returned)
        for failed in output.failed:
            if self._holds(failed.name, failed.epoch):
                del self._held[failed.name]
                self._failed.append(failed)
        return output

    def report(
        self, everything: bool = False, costs: Costs = NO_COSTS, holds: bool = False, alive: bool = False
    ) -> Report | None:
        """Urgent news; with ``everything``, also new tokens of unfinished trajectories and the state; with ``holds``,
        also which trajectories are here. None: no news, unless it is to say that it is ``alive``."""
        if not (everything or alive or self.urgent):
            return None
        pulled = self._pulled
        progress: list[TrajectoryNews] = []
        if everything or pulled is not None:
            for name, held in self._held.items():
                if (everything or not held.reported) and (part := self.engine.peek(name, held.reported)) is not None:
                    progress.append(_news(name, held, *part))
                    held.reported = token_count(part.spans)
        report = Report(
            self.name,
            self.applied.incarnation,
            self.applied,
            self.engine.snapshot(),
            self._finished,
            self._returned,
            progress,
            self._failed,
            pulled,
            costs,
            self.held() if holds else None,
        )
        self._finished, self._returned, self._failed, self._pulled = [], [], [], None
        return report

    def _left(self, results: list[Result]) -> list[TrajectoryNews]:
        """News of trajectories that left the engine, except those that were dropped in the meantime."""
        news: list[TrajectoryNews] = []
        for name, epoch, reason, tokens, logprobs, spans, _ in results:
            held = self._held.get(name)
            if held is not None and held.epoch == epoch:
                del self._held[name]
                why = reason if held.turn else ""
                news.append(_news(name, held, spans, tokens[held.reported :], logprobs[held.reported :], why))
        return news


def _news(
    name: str, held: _Held, spans: Spans, tokens: list[int], logprobs: list[float], reason: str = ""
) -> TrajectoryNews:
    chunk = Chunk.of(held.reported, tokens, logprobs) if tokens else None
    return TrajectoryNews(name, held.epoch, spans, chunk, reason)


class Requests:
    """Makes the request for a trajectory: its tokens so far, and how to sample the next ones."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self._sampling = sampling
        self._seed = seed

    def __call__(self, work: Work) -> Request:
        limit = {"max_tokens": min(work.limit, self._sampling.max_tokens)} if work.limit else {}
        return Request(
            work.trajectory,
            work.epoch,
            np.frombuffer(work.prompt, TOKEN).tolist(),
            np.frombuffer(work.tokens, TOKEN).tolist(),
            np.frombuffer(work.logprobs, LOGPROB).tolist(),
            work.spans,
            work.group,
            replace(self._sampling, seed=draw_seed(self._seed, work.trajectory), **limit),
        )


def draw_seed(seed: int, trajectory: str) -> int:
    """Seed for sampling a trajectory: the same wherever it runs and however often it is moved."""
    return digest("draw", seed, trajectory) >> 1


def stream_s(instances: int) -> float:
    """How often each of so many instances reports the tokens of unfinished trajectories."""
    return min(LONGEST_STREAM_S, STREAM_S * max(1.0, instances / STREAMING))


def serve(
    worker: RolloutWorker, link: Link, clock: Callable[[], float] = time.monotonic, every_s: float = STREAM_S
) -> None:
    """Work until ``Stop`` comes, or until there is no control plane any more. ``every_s``: between two reports of
    tokens of unfinished trajectories."""
    engine, meter = worker.engine, Meter(worker, clock)
    reported_in, said_at, streamed_at = 0.0, clock(), clock()
    everything, alive = True, True  # the first report says how much room there is
    asked = False
    """By a control plane that has taken over."""
    try:
        while True:
            tick = clock() // TICK_S
            if everything or alive or (worker.urgent and (tick > reported_in or not engine.busy)):
                link.send(meter.report(everything, asked))
                reported_in, said_at = tick, clock()
                streamed_at = said_at if everything else streamed_at
                asked = False
            wait = 0.0 if engine.busy else IDLE_S
            for message in link.receive(wait):
                if isinstance(message, Stop):
                    return
                if isinstance(message, TakeOver):
                    worker.take_over(message.term)
                    asked = True
                    continue
                worker.hear(message)
                while worker.pulling is not None:
                    meter.pull()
            if engine.busy and not asked:
                meter.step()
            everything = asked or clock() - streamed_at >= (every_s if engine.busy else IDLE_S)
            alive = clock() - said_at >= STREAM_S
    except Gone:
        return
