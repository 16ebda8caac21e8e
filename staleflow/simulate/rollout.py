"""The host of a rollout worker under simulation: the production worker over a modelled engine, on the virtual loop.

What a worker does is in ``staleflow/workers/rollout.py``. Here is what a process and its machine do to it: it works
when its engine is due, takes time to load weights, and can crash, hang, slow down and start again. Messages wait
while it hangs, as in the socket of a process that hangs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.rollout.engine import Request, Sampling
from staleflow.runtime.ports import Heard
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.engine import TO_THE_END, SimEngine
from staleflow.simulate.weights import SimWeights
from staleflow.types import Command, Report, Work, token_count
from staleflow.workers.rollout import STREAM_S, RolloutWorker

HEARTBEAT_S = 10.0
"""The state is looked at when something has happened, and otherwise this often."""


class SimRollout:
    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        engine: SimEngine,
        weights: SimWeights,
        report: Callable[[Report], None],
        every_s: float = STREAM_S,
    ) -> None:
        """``every_s``: how often it streams."""
        self.name = name
        self._every_s = every_s
        self.engine = engine
        self.up = True
        self.gone = False
        """For good."""
        self.pulls = 0
        self.pull_seconds = 0.0
        self.born = loop.now
        self.down_seconds = 0.0
        """Seconds in which it was dead or hung; those of a death count once it is back."""
        self._loop = loop
        self._weights = weights
        self._report = report
        self._down_since = 0.0
        self._hung_until = 0.0
        self._mail: list[Command] = []
        self._pull_began: float | None = None
        self._fetched = -1
        """The version that is being loaded, or was loaded last."""
        self._armed = math.inf
        self._last: Heard | None = None
        self._news = True
        """Whether something has happened since the state was looked at."""
        self._start(0)

    def _start(self, incarnation: int) -> None:
        self.worker = RolloutWorker(self.name, self.engine, self, modelled_request, incarnation)
        self._pull_began, self._fetched, self._mail, self._news = None, -1, [], True

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def incarnation(self) -> int:
        return self.worker.applied.incarnation

    @property
    def hung(self) -> bool:
        return self._loop.now < self._hung_until

    # The port

    def send(self, command: Command) -> None:
        if self.hung:
            self._mail.append(command)
        elif self.up:
            self.engine.now = self._loop.now
            self.worker.hear(command)
            self._continue()

    def heard(self) -> Heard:
        now, last = self._loop.now, self._last
        if last is not None and (not self.up or self.hung or (not self._news and now - last.time < HEARTBEAT_S)):
            return last
        if last is not None and (last.time, last.incarnation) == (now, self.incarnation):
            return last  # nobody answers within the moment; what was just sent would seem to wait for memory
        self.engine.now = now
        self._news = False
        self._last = Heard(now, self.incarnation, self.worker.applied, self.engine.snapshot())
        return self._last

    def held(self) -> list[tuple[str, int]]:
        return self.worker.held() if self.up else []

    def stream(self) -> None:
        """Send what a worker that streams now and then (``stream_s``) would have sent by now.

        Nobody looks at these tokens unless the worker falls silent or a version is published, so they are sent only
        then.
        """
        if self.up and not self.hung and self._pull_began is None:
            self._stream()

    def _stream(self) -> None:
        self._work()
        *_, seconds = self.engine.snapshot().step or (1.0,)
        self.engine.behind = math.ceil((self._loop.now % self._every_s) / seconds)
        report = self.worker.report(everything=True)
        self.engine.behind = 0
        if report is not None:
            self._send_report(report)

    # What is counted

    def generated_tokens(self) -> int:
        """All tokens ever made here."""
        return self.engine.instance.load(self._loop.now).generated_tokens

    def on_engine(self) -> int:
        """Tokens made here for trajectories that are still here."""
        self.engine.now = self._loop.now
        return self.engine.tokens_here()

    # Faults

    def crash(self) -> None:
        """Die. The server knows the tokens up to the last stream; the others are lost."""
        if not self.up:
            return
        self.heard()
        if not self.hung:
            self._stream()
        self.engine.now = self._down_since = self._loop.now
        self.engine.crash()
        self.up = False

    def leave(self) -> None:
        """End for good. If it was taken for dead while it hung, it still holds what others have by now."""
        self.crash()
        self.gone = True

    def restart(self) -> None:
        """Begin a new incarnation, with empty memory and no weights."""
        if self.gone:
            return
        self.down_seconds += self._loop.now - self._down_since
        self.up, self.engine.version = True, -1
        self._start(self.incarnation + 1)

    def hang(self, seconds: float) -> None:
        """Answer nothing and do nothing for a while; commands wait."""
        if not self.up or self.hung:
            return
        self.heard()
        self.stream()
        self._hung_until = self._loop.now + seconds
        self.down_seconds += seconds
        self.engine.pause()
        self._arm()
        self._loop.at(self._hung_until, self._wake, self.incarnation)

    def _wake(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.up:
            return
        self.engine.now = self._loop.now
        if self._pull_began is None:
            self.engine.resume()
        mail, self._mail = self._mail, []
        for command in mail:
            self.worker.hear(command)
        self._continue()

    def slow_down(self, factor: float) -> None:
        if self.up:
            self.engine.instance.set_speed(self._loop.now, factor)
            self._arm()

    # Work

    def _fire(self, due: float) -> None:
        if due == self._armed:
            self._armed = math.inf
            self._work()

    def _work(self) -> None:
        """Make the steps that are due."""
        self.engine.now = self._loop.now
        while self.engine.due <= self._loop.now:
            self.worker.step()
        self._continue()

    def _continue(self) -> None:
        """Load weights if the worker is to pull, and send its report if there is one."""
        self._news = True
        worker, engine = self.worker, self.engine
        if not self.hung:
            while worker.pulling is not None and worker.pulling <= engine.version:
                worker.pull()  # the version is already loaded
            if worker.pulling is not None:
                self._load()
            if (report := worker.report()) is not None:
                self._send_report(report)
        self._arm()

    def _load(self) -> None:
        """Weights change between two steps: the present step is completed first."""
        if self._pull_began is None:
            self._pull_began, self._fetched = self._loop.now, -1
            self.engine.pause()
        if self.engine.instance.paused and self._fetched < 0:
            self._fetched, incarnation = self._weights.version, self.incarnation
            self._weights.fetch(lambda: self._loaded(incarnation))

    def _loaded(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.up:
            return
        if self.hung:
            self._loop.at(self._hung_until, self._loaded, incarnation)
            return
        assert self._pull_began is not None
        self.pulls += 1
        self.pull_seconds += self._loop.now - self._pull_began
        self._pull_began, self.engine.now = None, self._loop.now
        self.worker.pull()
        self._continue()

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:  # noqa: ARG002
        """The weights that were fetched: ``WeightSource`` of the worker."""
        return max(self._fetched, self.engine.version)

    def _arm(self) -> None:
        due = self.engine.due
        if due < self._armed:
            self._armed = due
            self._loop.at(max(due, self._loop.now), self._fire, due)

    def _send_report(self, report: Report) -> None:
        self._news, self._last = False, Heard(self._loop.now, report.incarnation, report.applied, report.state)
        self._report(report)


def modelled_request(work: Work) -> Request:
    """A request for the modelled engine, which needs to know how many tokens there are, not which."""
    prompt, tokens = range(work.prompt_tokens), range(token_count(work.spans))
    sampling = Sampling(max_tokens=work.limit) if work.limit else TO_THE_END
    return Request(work.trajectory, work.epoch, prompt, tokens, (), work.spans, work.group, sampling)
