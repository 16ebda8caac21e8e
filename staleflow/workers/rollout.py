"""A rollout instance: an engine, and what it has been told and has not told yet.

``RolloutWorker`` knows nothing of sockets, clocks or processes; ``serve`` lets it work between two looks at its link::

    worker = RolloutWorker(engine, weights, sampling, seed=0)
    worker.obey(Submit((1, 0, 1), [job]))
    worker.step()
    news = worker.news(everything=False)      # None if there is nothing to tell

What is told is kept short: finished trajectories a moment later, together with the next ones; tokens of the others
every two seconds. Before the weights change, those that have begun and were never told of are: the control plane must
not take a group for untouched that has tokens of an older version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from staleflow.rollout.engine import Engine, Failed, Request, Result, Sampling, WeightSource
from staleflow.servers.payloads import LOGPROB, TOKEN
from staleflow.tasks.task import digest
from staleflow.types import Abort, Interrupt, Job, Load, News, Ordered, Pull, Spans, Stop, Submit, Told
from staleflow.workers.link import Gone, Link
from staleflow.workers.meter import StepMeter

TOGETHER_S = 0.03
"""Trajectories that finish within this time are told of together."""
STREAM_S = 2.0
"""How often the tokens of unfinished trajectories are told."""
BLOCK = 16
"""Prompt tokens that are shared or not as one."""
IDLE_S = 5.0
"""An instance without work says that it is alive this often."""


@dataclass(slots=True)
class _Held:
    """A trajectory in the engine."""

    epoch: int
    prompt: int
    """Its tokens."""
    group: str
    told: int
    """Tokens that the control plane knows."""
    tokens: list[int]
    """Those it does not know."""
    logprobs: list[float]
    spans: list[tuple[int, int]]

    def grow(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + len(tokens))
        else:
            self.spans.append((version, len(tokens)))

    def tell(self, name: str) -> Told:
        """Everything that has not been told."""
        told = _told(name, self.epoch, tuple(self.spans), self.told, self.tokens, self.logprobs)
        self.told += len(self.tokens)
        self.tokens, self.logprobs = [], []
        return told


@dataclass(slots=True)
class _Untold:
    finished: list[Told] = field(default_factory=list[Told])
    returned: list[Told] = field(default_factory=list[Told])
    failed: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])
    progress: dict[str, Told] = field(default_factory=dict[str, Told])
    """By trajectory: a message says one thing of each."""
    pulled: int | None = None

    @property
    def any(self) -> bool:
        return bool(self.finished or self.returned or self.failed or self.progress) or self.pulled is not None


class RolloutWorker:
    def __init__(self, engine: Engine, weights: WeightSource, sampling: Sampling, seed: int) -> None:
        self.engine = engine
        self.weights = weights
        self._sampling = sampling
        self._seed = seed
        self._held: dict[str, _Held] = {}
        self._untold = _Untold()
        self._applied = (0, 0, 0)
        self._generated = 0
        self._busy_s = 0.0
        self._meter = StepMeter()
        self._ended: list[tuple[int, float]] = []
        """How many trajectories finished when, of those that are not told."""

    @property
    def urgent(self) -> bool:
        """Whether there is something that somebody waits for."""
        return self._untold.any

    def obey(self, command: Ordered) -> None:
        """Commands of an earlier life of the control plane come too late."""
        if command.fence[0] < self._applied[0]:
            return
        self._applied = command.fence
        match command:
            case Submit(jobs=jobs):
                self._submit(jobs)
            case Interrupt(names=names):
                self.engine.interrupt([name for name, epoch in names if self._holds(name, epoch)])
            case Abort(names=names):
                self._abort([name for name, epoch in names if self._holds(name, epoch)])
            case Pull(version=version):
                self._pull(version)

    def step(self) -> None:
        """One step of the engine."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        output = self.engine.step()
        held = self._held
        for name, _, tokens, logprobs in output.progress:
            held[name].grow(tokens, logprobs, output.version)
            self._generated += len(tokens)
        self._untold.finished += self._left(output.finished)
        self._untold.returned += self._left(output.returned)
        for failed in output.failed:
            self._fail(failed)
        now = time.perf_counter()
        if output.finished:
            self._ended.append((len(output.finished), now))
        self._busy_s += now - began
        self._meter.step(self.engine.snapshot(), len(output.progress), now - began, time.thread_time() - cpu_began)

    def news(self, everything: bool) -> News | None:
        """What to tell: what somebody waits for, and if ``everything``, the tokens of those that go on."""
        if everything:
            self._tell(name for name, held in self._held.items() if held.tokens)
        elif not self._untold.any:
            return None
        untold, self._untold = self._untold, _Untold()
        now = time.perf_counter()
        for count, ended in self._ended:
            self._meter.told(count, now - ended)
        self._ended = []
        progress, costs = list(untold.progress.values()), self._meter.drain()
        return News(self._load(), untold.finished, untold.returned, progress, untold.failed, untold.pulled, costs)

    def _submit(self, jobs: list[Job]) -> None:
        self._abort([job.trajectory for job in jobs if job.trajectory in self._held])
        requests: list[Request] = []
        submitted: list[_Held] = []
        for job in jobs:
            tokens, logprobs = np.frombuffer(job.tokens, TOKEN).tolist(), np.frombuffer(job.logprobs, LOGPROB).tolist()
            prompt = np.frombuffer(job.prompt, TOKEN).tolist()
            held = self._held[job.trajectory] = _Held(
                job.epoch, len(prompt), job.group, len(tokens), [], [], list(job.spans)
            )
            submitted.append(held)
            requests.append(
                Request(
                    job.trajectory,
                    job.epoch,
                    prompt,
                    tokens,
                    logprobs,
                    job.spans,
                    job.group,
                    replace(self._sampling, seed=draw_seed(self._seed, job.trajectory)),
                )
            )
        self.engine.submit(requests)
        self._meter.owe(prefill(submitted))

    def _holds(self, name: str, epoch: int) -> bool:
        return name in self._held and self._held[name].epoch == epoch

    def _abort(self, names: list[str]) -> None:
        self.engine.abort(names)
        for name in names:
            del self._held[name]

    def _pull(self, version: int) -> None:
        """Which trajectories have tokens of the old version is told together with the news of the new one."""
        self._tell(name for name, held in self._held.items() if held.tokens and not held.told)
        began, before = time.perf_counter(), self.engine.snapshot().version
        self._untold.pulled = self.engine.pull(self.weights, version)
        self._meter.pulled(time.perf_counter() - began)
        if self._untold.pulled != before:  # what has begun is prefilled again
            self._meter.owe(prefill(held for held in self._held.values() if held.told or held.tokens))

    def _tell(self, names: Iterable[str]) -> None:
        for name in names:
            told = self._held[name].tell(name)
            before = self._untold.progress.pop(name, None)
            self._untold.progress[name] = _joined(before, told)

    def _left(self, results: list[Result]) -> list[Told]:
        """Those that have left the engine, but for what was interrupted first and then dropped before it had left."""
        told: list[Told] = []
        for name, epoch, _, tokens, logprobs, spans, _ in results:
            if self._holds(name, epoch):
                known = self._held.pop(name).told
                rest = _told(name, epoch, spans, known, tokens[known:], logprobs[known:])
                told.append(_joined(self._untold.progress.pop(name, None), rest))
        return told

    def _fail(self, failed: Failed) -> None:
        if self._holds(failed.name, failed.epoch):
            del self._held[failed.name]
            self._untold.failed.append((failed.name, failed.epoch, failed.message))

    def _load(self) -> Load:
        now = self.engine.snapshot()
        return Load(
            self._applied,
            now.version,
            now.running,
            now.waiting,
            now.context,
            now.kv_free,
            now.kv_total,
            now.max_running,
            now.step,
            self._generated,
            self._busy_s,
        )


def serve(worker: RolloutWorker, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
    """Work until told to stop, or until the control plane is gone."""
    told_at = streamed_at = clock()
    if (news := worker.news(everything=True)) is not None:
        link.send(news)  # how much room there is
    while True:
        now = clock()
        streaming = now - streamed_at >= (STREAM_S if worker.engine.busy else IDLE_S)
        if streaming or (worker.urgent and now - told_at >= TOGETHER_S):
            if (news := worker.news(streaming)) is not None:
                link.send(news)
            told_at = now
            streamed_at = now if streaming else streamed_at
        if worker.engine.busy:
            wait = 0.0
        elif worker.urgent:
            wait = TOGETHER_S
        else:
            wait = IDLE_S
        try:
            for message in link.receive(wait):
                if isinstance(message, Stop):
                    return
                worker.obey(message)
        except Gone:
            return
        if worker.engine.busy:
            worker.step()


def prefill(trajectories: Iterable[_Held]) -> int:
    """Tokens that are computed before these can go on: whole blocks of a prompt once for its group."""
    tokens, seen = 0, set[str]()
    for each in trajectories:
        tokens += each.told + len(each.tokens) + (each.prompt % BLOCK if each.group in seen else each.prompt)
        seen.add(each.group)
    return tokens


def draw_seed(seed: int, trajectory: str) -> int:
    """Which random numbers a trajectory draws: the same wherever it runs and however often it is moved."""
    return digest("draw", seed, trajectory) >> 1


def _joined(before: Told | None, told: Told) -> Told:
    """What has not been sent yet and what has come since, as one."""
    if before is None or before.epoch != told.epoch:
        return told
    return Told(
        told.trajectory,
        told.epoch,
        told.spans,
        before.start,
        before.tokens + told.tokens,
        before.logprobs + told.logprobs,
    )


def _told(name: str, epoch: int, spans: Spans, start: int, tokens: list[int], logprobs: list[float]) -> Told:
    ids: Any = np.array(tokens, TOKEN)
    return Told(name, epoch, spans, start, ids.tobytes(), np.array(logprobs, LOGPROB).tobytes())
