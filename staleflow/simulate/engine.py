"""The modelled engine behind the interface of the real ones: no weights, no tokens, no time but the one it is given.

A worker, a test or a planner that drives an ``Engine`` can drive this one without PyTorch. A step goes to the next
moment at which a request joins or leaves, so it may make thousands of tokens at once; results hold no tokens, only
their number under each version. ::

    engine = SimEngine(Instance(cost, kv_blocks=4096), length_of=lambda request: 200)
    engine.submit([Request("t1", epoch=1, prompt=[5, 8, 13])])
    while engine.busy:
        output = engine.step()
    engine.now      # seconds that a real one would have taken

A caller with a clock of its own sets ``now`` before each call, and calls ``step`` only when it is ``due``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.rollout.engine import EngineError, LoadWeights, Part, Reason, Request, Result, StepOutput, WeightSource
from staleflow.rollout.options import Sampling
from staleflow.simulate.instance import Finished, Instance, InstanceEvent, Paused, SimRequest
from staleflow.types import Failed, InstanceState, Spans, made_count, token_count

TO_THE_END = Sampling(max_tokens=2**53)


@dataclass(slots=True, eq=False)
class _HeldRequest(SimRequest):
    """A request on the instance, under a name used once: it may come again before the first has left."""

    outside: str = ""
    """Its name outside the engine."""
    reason: Reason = "length"
    """Why it will end."""
    spans: Spans = ()
    marked: int = 0
    """Tokens in ``spans``; those beyond are of the engine's present version."""
    began: int = 0
    """Tokens that were generated before it came here."""
    aborted: bool = False
    turn: bool = False
    """Whether it may come again with more tokens."""

    def stamped(self, generated: int, version: int) -> Spans:
        fresh = generated - self.marked
        if fresh <= 0:
            return self.spans
        if self.spans and self.spans[-1][0] == version:
            return (*self.spans[:-1], (version, self.spans[-1][1] + fresh))
        return (*self.spans, (version, fresh))


class SimEngine:
    def __init__(
        self,
        instance: Instance,
        length_of: Callable[[Request], int] = lambda request: request.sampling.max_tokens,
        version: int = 0,
        left: Callable[[str, int], None] = lambda _name, _tokens: None,
    ) -> None:
        """``left`` is called for every request that leaves, dropped ones too: its name, and the tokens made here."""
        self.now = 0.0
        self.version = version
        self.instance = instance
        self.behind = 0
        """How many of the latest tokens ``peek`` leaves out."""
        self._length_of = length_of
        self._left = left
        self._held: dict[str, _HeldRequest] = {}
        self._kept: dict[str, int] = {}
        """By name: tokens whose KV entries a finished turn has left here, the latest last. Others may take their
        memory."""
        self._serial = 0
        self._finished: list[Result] = []
        self._returned: list[Result] = []
        self._failed: list[Failed] = []
        self._closed = False

    @property
    def busy(self) -> bool:
        return bool(self._held or self._finished or self._returned or self._failed)

    @property
    def due(self) -> float:
        """When ``step`` next has something to do or to report; infinity if nothing happens by itself."""
        if self._finished or self._returned or self._failed:
            return self.now
        return self.instance.next_event()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            limit, given = request.sampling.max_tokens, len(request.tokens) - made_count(request.spans)
            length = min(self._length_of(request), limit) + given
            if (problem := self._problem(request, length)) is not None:
                self._failed.append(Failed(request.name, request.epoch, problem))
                continue
            self._serial += 1
            done = len(request.tokens)
            cached = self._cached(request.name) if self._kept else 0
            held = self._held[request.name] = _HeldRequest(
                f"{request.name}#{self._serial}",
                request.group or request.name,
                len(request.prompt),
                done,
                length,
                request.epoch,
                cached,
                request.name,
                "length" if length == limit + given else "stop",
                request.spans,
                done,
                done,
                turn=limit < TO_THE_END.max_tokens,
            )
            self.instance.submit(self.now, held)

    def interrupt(self, names: Sequence[str]) -> None:
        self._leave(self._held[name] for name in names if name in self._held)

    def abort(self, names: Sequence[str]) -> None:
        known = [self._held.pop(name) for name in dict.fromkeys(names) if name in self._held]
        for held in known:
            held.aborted = True
        self._leave(known)

    def step(self) -> StepOutput:
        if self._closed:
            raise EngineError("the engine is closed: make a new one")
        instance = self.instance
        made, prefilled, context = instance.generated_tokens, instance.prefilled_tokens, instance.context_tokens
        if (due := self.due) < math.inf:
            self.now = max(self.now, due)
            self._take(instance.advance(self.now))
        output = StepOutput(
            self._finished,
            self._returned,
            self._failed,
            instance.generated_tokens - made,
            instance.prefilled_tokens - prefilled,
            context,
        )
        self._finished, self._returned, self._failed = [], [], []
        return output

    def peek(self, name: str, start: int) -> Part | None:
        held = self._held.get(name)
        if held is None:
            return None
        generated = max(held.marked, self.instance.generated(held.name, self.now) - self.behind)
        return Part(held.stamped(generated, self.version), [], []) if generated > start else None

    def pull(self, source: WeightSource | LoadWeights, version: int) -> int:
        found = source.pull({}, version) if isinstance(source, WeightSource) else source({})
        if found < version:
            raise EngineError(f"asked for version {version} of the weights and got {found}: push it before the pull")
        if found != self.version:
            if not self.instance.paused:
                self.pause()
            for held in self._held.values():
                generated = self.instance.generated(held.name, self.now)
                held.spans, held.marked = held.stamped(generated, self.version), generated
                held.cached = 0
            self._kept.clear()
            self.resume()
            self.version = found
        return found

    def weights(self) -> Mapping[str, Any]:
        return {}

    def snapshot(self) -> InstanceState:
        instance = self.instance
        load = instance.load_at_last_step() if instance.next_event() <= self.now else instance.load(self.now)
        running, context, free = load.running, load.context_tokens, load.kv_free
        step = (running, context, instance.cost.step(running, context) / instance.speed) if running else None
        return InstanceState(
            self.version,
            running + load.prefilling,
            load.waiting,
            context + instance.prefilling_tokens,
            free,
            free + load.kv_used,
            instance.max_running,
            self.version,
            step,
        )

    def close(self) -> None:
        self.abort(list(self._held))
        self._closed = True

    # What a process goes through

    def pause(self) -> None:
        """Make no further step once the present one is over."""
        self.instance.pause(self.now)
        self._take(self.instance.advance(self.now))

    def resume(self) -> None:
        """Continue, with an empty KV cache."""
        self.instance.resume(self.now)

    def crash(self) -> None:
        """Lose everything; what is left is an empty engine."""
        self._take(self.instance.advance(self.now))
        for request in self.instance.crash(self.now):
            assert isinstance(request, _HeldRequest)
            self._left(request.outside, request.generated - request.began)
        self._held, self._finished, self._returned, self._failed, self._kept = {}, [], [], [], {}

    def tokens_here(self) -> int:
        """Tokens made here for requests that are still on the instance."""
        began = sum(each.began for each in self.instance.requests() if isinstance(each, _HeldRequest))
        return sum(generated for _, generated in self.instance.progress(self.now)) - began

    # Within

    def _cached(self, name: str) -> int:
        """Tokens of an earlier turn that are still here: what is free holds them, the latest ones first."""
        room = self.instance.load_at_last_step().kv_free
        for each, tokens in reversed(self._kept.items()):
            room -= tokens
            if room < 0:
                break
            if each == name:
                return self._kept.pop(name)
        return 0

    def _problem(self, request: Request, length: int) -> str | None:
        name, tokens, capacity = request.name, len(request.tokens), self.instance.kv_total
        if name in self._held:
            return f"request {name} is already here: interrupt or abort it first"
        if not request.prompt:
            return f"request {name} has an empty prompt: give at least one token"
        if tokens != token_count(request.spans):
            return f"request {name} resumes with {tokens} tokens and spans {request.spans}: give one of each per token"
        if tokens >= length:
            return f"request {name} already has its {length} tokens: raise max_tokens"
        if len(request.prompt) + length > capacity:
            return f"request {name} needs more than the engine's {capacity} tokens: raise kv_tokens"
        return None

    def _leave(self, held: Iterable[_HeldRequest]) -> None:
        self.instance.interrupt(self.now, [each.name for each in held])
        self._take(self.instance.advance(self.now))

    def _take(self, events: list[InstanceEvent]) -> None:
        for event in events:
            if isinstance(event, Paused):
                continue
            held, finished = event.request, isinstance(event, Finished)
            assert isinstance(held, _HeldRequest)
            self._left(held.outside, held.generated - held.began)
            if held.aborted:
                continue
            del self._held[held.outside]
            spans, reason = held.stamped(held.generated, self.version), held.reason if finished else "interrupted"
            result = Result(held.outside, held.epoch, reason, [], [], spans, self.version)
            (self._finished if finished else self._returned).append(result)
            if held.turn:
                self._kept.pop(held.outside, None)
                self._kept[held.outside] = held.prompt + held.generated - 1  # its last token was not run
