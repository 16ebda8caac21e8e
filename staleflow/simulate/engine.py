"""The modelled engine behind the interface of the real ones: no weights, no tokens to speak of, no time but its own.

A worker, a test or a planner that drives an ``Engine`` can drive this one without PyTorch. A step goes to the next
moment at which somebody joins or leaves, so it may bring many tokens at once; all of them are 0. ::

    engine = SimEngine(cost, length_of=lambda request: 200)
    engine.submit([Request("t1", epoch=1, prompt=[5, 8, 13])])
    while engine.busy:
        output = engine.step()
    engine.now      # seconds that a real one would have taken
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.coordinator.cost import CostModel
from staleflow.rollout.engine import (
    EngineError,
    EngineSnapshot,
    Failed,
    Load,
    Progress,
    Reason,
    Request,
    Result,
    StepOutput,
    WeightSource,
)
from staleflow.simulate import kv
from staleflow.simulate.instance import Finished, Instance, Interrupted


@dataclass(slots=True)
class _Held:
    request: Request
    made: int
    """Tokens that have been reported."""
    spans: list[tuple[int, int]]

    def stamp(self, count: int, version: int) -> None:
        self.made += count
        if count and self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + count)
        elif count:
            self.spans.append((version, count))

    def result(self, reason: Reason, version: int) -> Result:
        request, spans = self.request, tuple(self.spans)
        more = self.made - len(request.tokens)
        tokens, logprobs = [*request.tokens, *[0] * more], [*request.logprobs, *[0.0] * more]
        return Result(request.name, request.epoch, reason, tokens, logprobs, spans, version)


class SimEngine:
    def __init__(
        self,
        cost: CostModel,
        kv_tokens: int = 65_536,
        block: int = 16,
        max_running: int = 64,
        chunk: int = 512,
        pull_s: float = 0.0,
        length_of: Callable[[Request], int] = lambda request: request.sampling.max_tokens,
        version: int = 0,
    ) -> None:
        self.now = 0.0
        self.version = version
        self.instance = Instance(cost, kv_tokens // block, block, max_running, chunk)
        self._pull_s = pull_s
        self._length_of = length_of
        self._kv_tokens = kv_tokens // block * block
        self._held: dict[str, _Held] = {}
        self._aborted: set[str] = set()
        self._failed: list[Failed] = []
        self._closed = False

    @property
    def busy(self) -> bool:
        return bool(self._held or self._failed)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            length = min(self._length_of(request), request.sampling.max_tokens)
            if (problem := self._problem(request, length)) is not None:
                self._failed.append(Failed(request.name, request.epoch, problem))
                continue
            self._held[request.name] = _Held(request, len(request.tokens), list(request.spans))
            group = request.group or request.name
            wanted = kv.Request(request.name, group, len(request.prompt), len(request.tokens), length, request.epoch)
            self.instance.submit(self.now, wanted)

    def interrupt(self, names: Sequence[str]) -> None:
        self.instance.interrupt(self.now, [name for name in names if name in self._held])

    def abort(self, names: Sequence[str]) -> None:
        known = [name for name in names if name in self._held]
        self._aborted.update(known)
        self.instance.interrupt(self.now, known)

    def step(self) -> StepOutput:
        if self._closed:
            raise EngineError("the engine is closed: make a new one")
        progress: list[Progress] = []
        finished: list[Result] = []
        returned: list[Result] = []
        due = self.instance.next_event()
        if due < math.inf:
            self.now = max(self.now, due)
            for event in self.instance.advance(self.now):
                if isinstance(event, Finished | Interrupted):
                    ended = isinstance(event, Finished)
                    self._leave(event.request, ended, progress, finished if ended else returned)
            for name, generated in self.instance.progress(self.now):
                self._note(self._held[name], generated, progress)
        failed, self._failed = self._failed, []
        return StepOutput(self.version, progress, finished, returned, failed)

    def pull(self, source: WeightSource | Load, version: int) -> int:
        held = source.pull({}, version) if isinstance(source, WeightSource) else source({})
        if held < version:
            raise EngineError(f"asked for version {version} of the weights and got {held}: push it before the pull")
        if held != self.version:
            self.instance.pause(self.now)
            self.instance.advance(self.now)
            self.now += self._pull_s
            self.instance.resume(self.now)
            self.version = held
        return held

    def weights(self) -> dict[str, Any]:
        return {}

    def snapshot(self) -> EngineSnapshot:
        load = self.instance.load(self.now)
        return EngineSnapshot(
            version=self.version,
            running=load.running + load.prefilling,
            waiting=load.waiting,
            context=load.context_tokens,
            kv_used=load.kv_used,
            kv_free=load.kv_free,
            kv_total=self._kv_tokens,
            max_running=self.instance.max_running,
            kv_version=self.version,
        )

    def close(self) -> None:
        self.abort(list(self._held))
        self._held.clear()
        self._closed = True

    def _problem(self, request: Request, length: int) -> str | None:
        if request.name in self._held:
            return f"request {request.name} is already here: interrupt or abort it first"
        if not request.prompt:
            return f"request {request.name} has an empty prompt: give at least one token"
        if len(request.tokens) >= length:
            return f"request {request.name} already has its {length} tokens: raise max_tokens"
        if len(request.prompt) + length > self._kv_tokens:
            return f"request {request.name} needs more than the engine's {self._kv_tokens} tokens: raise kv_tokens"
        return None

    def _note(self, held: _Held, generated: int, progress: list[Progress]) -> None:
        count = generated - held.made
        if count > 0:
            held.stamp(count, self.version)
            if held.request.name not in self._aborted:
                progress.append(Progress(held.request.name, held.request.epoch, [0] * count, [0.0] * count))

    def _leave(self, left: kv.Request, ended: bool, progress: list[Progress], results: list[Result]) -> None:
        held = self._held.pop(left.name)
        self._note(held, left.generated, progress)
        if left.name in self._aborted:
            self._aborted.discard(left.name)
        else:
            results.append(held.result("length" if ended else "interrupted", self.version))
