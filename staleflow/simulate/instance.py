"""A rollout instance under simulation: continuous batching whose work does not depend on the number of tokens.

It behaves like an engine that runs step by step. At a step boundary it applies the commands that have arrived, admits
waiting requests in order, and preempts the most recently admitted ones if the key/value cache would overflow. The
step then decodes a token for each running request and prefills up to ``chunk`` tokens in order. As long as no request
joins or leaves, all that is arithmetic, so the instance jumps from one change to the next: a *segment* of equal steps
whose end is known in closed form. A command that arrives inside a segment cuts it at the next boundary. Nothing is
ever undone::

    instance = Instance(cost, kv_blocks=20_000)
    instance.submit(0.0, SimRequest("t1", "g1", prompt=512, generated=0, target=1500))
    events = instance.advance(instance.next_event())

Time is a parameter and never decreases. ``advance(now)`` leaves a boundary at ``now`` itself open, so that what is
decided at that instant applies there; ``next_event()`` starts the step. A command that still comes at the time of that
boundary applies there too, except that a boundary that has preempted admits nothing more while anything is admitted.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from staleflow.coordinator.cost import CostModel
from staleflow.simulate.kv import PrefillSteps, Seat, SimRequest, SimScheduler

__all__ = ["Finished", "Instance", "InstanceEvent", "InstanceLoad", "Interrupted", "Paused", "SimRequest"]


class Finished(NamedTuple):
    request: SimRequest
    time: float


class Interrupted(NamedTuple):
    request: SimRequest
    time: float


class Paused(NamedTuple):
    time: float


InstanceEvent = Finished | Interrupted | Paused


class InstanceLoad(NamedTuple):
    """The load of an instance at a step boundary."""

    running: int
    prefilling: int
    waiting: int
    context_tokens: int  # of the running requests, a shared prompt counted for each
    kv_used: int  # in tokens, whole blocks
    kv_free: int
    generated_tokens: int  # since the start
    prefilled_tokens: int  # since the start


_Command = tuple[float, Callable[[Any, list[InstanceEvent]], None], Any]  # arrival time, action, its argument


class Instance:
    """See the module. The public counts hold at the last boundary that was processed; ``load(now)`` at ``now``.

    Either ``_planned`` is false, and the instance stands at the boundary ``_at``; or it is in a segment of ``_count``
    steps from ``_at`` to ``_end`` (no steps and no end: idle or paused), of which it will make ``_cut``, until
    ``_due``. Until then ``_scheduler`` stays what it was at ``_at``.
    """

    def __init__(
        self,
        cost: CostModel,
        kv_blocks: int,
        block: int = 16,
        max_running: int = 256,
        chunk: int = 2048,
        speed: float = 1.0,
    ) -> None:
        sizes = {"kv_blocks": kv_blocks, "block": block, "max_running": max_running, "chunk": chunk}
        for what, size in sizes.items():
            if size < 1:
                raise ValueError(f"{what} is {size}; it must be at least 1")
        self.cost = cost
        self.max_running = max_running
        self.chunk = chunk
        self.speed = _checked_speed(speed)
        self.paused = False
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.preemptions = 0
        self.busy_seconds = 0.0
        self.segments = 0
        self._scheduler = SimScheduler(kv_blocks, block)
        self._commands: deque[_Command] = deque()
        self._clock = -math.inf
        self._preempted_at = -math.inf
        self._planned = False
        self._at = -math.inf
        self._count = self._cut = 0
        self._end = self._due = math.inf
        self._chunk: PrefillSteps | None = None

    # Commands. They wait for the next boundary.

    def submit(self, now: float, request: SimRequest) -> None:
        self._tick(now)
        self._command(now, self._enqueue, self._scheduler.seat(request))

    def interrupt(self, now: float, names: Iterable[str]) -> None:
        """Have them leave with the tokens they have at the boundary; unknown names are ignored."""
        self._tick(now)
        self._command(now, self._remove, tuple(names))

    def pause(self, now: float) -> None:
        """Stop at the next boundary, with the event ``Paused``."""
        self._tick(now)
        self._command(now, self._stop, None)

    def resume(self, now: float) -> None:
        """Continue with other weights: every admitted request is prefilled again. Ignored if not paused."""
        self._tick(now)
        self._command(now, self._restart, None)

    def set_speed(self, now: float, factor: float) -> None:
        """Divide the time of all further steps by ``factor``, relative to the cost model."""
        self._tick(now)
        self._command(now, self._change_speed, _checked_speed(factor))

    def crash(self, now: float) -> list[SimRequest]:
        """Lose everything at once; the requests, in the order of submission, with the tokens of the last whole step.

        Call ``advance(now)`` first. What is left is an empty instance that runs at speed 1; its totals continue.
        """
        self._tick(now)
        scheduler, load = self._scheduler, self.load(now)
        for name, generated in list(self.progress(now)):
            scheduler.seats[name].request.generated = generated
        self.generated_tokens = load.generated_tokens
        self.prefilled_tokens = load.prefilled_tokens
        if self._planned and self._count:
            self.busy_seconds += now - self._at
        self._scheduler = SimScheduler(scheduler.pool.capacity, scheduler.pool.block)
        self._commands.clear()
        self._planned = self.paused = False
        self._at = now
        self.speed = 1.0
        return [seat.request for seat in scheduler.seats.values()]

    # Time.

    def next_event(self) -> float:
        """When there is next something to apply or to report; infinity if nothing happens without a command."""
        if not self._planned:
            if self._commands and self._commands[0][0] <= self._at:
                return self._at
            self._plan()
        return self._due

    def advance(self, now: float) -> list[InstanceEvent]:
        """Run up to and including ``now``; the events by time, and at the same time finished requests first."""
        self._tick(now)
        events: list[InstanceEvent] = []
        commands = self._commands
        while True:
            if not self._planned:
                while commands and commands[0][0] <= self._at:
                    _, act, what = commands.popleft()
                    act(what, events)
                if self._at >= now:
                    return events
                self._plan()
            if self._due > now:
                return events
            self._move(events)

    # State.

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def prefilling(self) -> int:
        return len(self._scheduler.prefill)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.seats) - len(self._scheduler.admitted)

    @property
    def context_tokens(self) -> int:
        return self._scheduler.context

    @property
    def prefilling_tokens(self) -> int:
        """Context of the requests in the prefill queue."""
        return self._scheduler.filling

    @property
    def kv_total(self) -> int:
        return self._scheduler.pool.capacity * self._scheduler.pool.block

    @property
    def kv_used(self) -> int:
        return self._scheduler.pool.used * self._scheduler.pool.block

    @property
    def kv_free(self) -> int:
        return self.kv_total - self.kv_used

    def load(self, now: float) -> InstanceLoad:
        """The state at the last boundary up to ``now``, in constant time; call ``advance(now)`` first."""
        return self._load_after(self._steps_done(now))

    def load_at_last_step(self) -> InstanceLoad:
        """The state at the boundary where a request last joined or left: a little old, and very cheap."""
        return self._load_after(0)

    def _load_after(self, steps: int) -> InstanceLoad:
        """The state after this many steps of the segment."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        running = scheduler.running
        made = running * steps
        grown = pool.growth(scheduler.step, steps, running) if steps else 0
        used = (pool.used + grown) * pool.block
        return InstanceLoad(
            running,
            len(scheduler.prefill),
            len(scheduler.seats) - len(scheduler.admitted),
            scheduler.context + made,
            used,
            pool.capacity * pool.block - used,
            self.generated_tokens + made,
            self.prefilled_tokens + (self._chunk.tokens * steps if self._chunk else 0),
        )

    def progress(self, now: float) -> Iterator[tuple[str, int]]:
        """Name and generated tokens of each request, in the order of submission; otherwise as ``load``."""
        step = self._scheduler.step + self._steps_done(now)
        for name, seat in self._scheduler.seats.items():
            request = seat.request
            yield name, request.generated if seat.end < 0 else request.target - (seat.end - step)

    def generated(self, name: str, now: float) -> int:
        """The generated tokens of one request that is here; otherwise as ``load``."""
        seat = self._scheduler.seats[name]
        request = seat.request
        if seat.end < 0:
            return request.generated
        return request.target - (seat.end - self._scheduler.step - self._steps_done(now))

    def requests(self) -> list[SimRequest]:
        """All requests, in the order of submission; ``generated`` may be out of date."""
        return [seat.request for seat in self._scheduler.seats.values()]

    # Segments.

    def _plan(self) -> None:
        """Admit and preempt at this boundary, then find how many steps there are until a request joins or leaves."""
        self._planned = True
        scheduler, pool = self._scheduler, self._scheduler.pool
        self._count, self._end, self._chunk = 0, math.inf, None
        if not self.paused:
            limits: list[int] = []
            if scheduler.waiting:
                if self._at > self._preempted_at or not scheduler.admitted:
                    scheduler.admit(self.max_running)
                else:
                    limits.append(1)  # the next boundary may admit again
            while pool.overfull(scheduler.step):
                scheduler.preempt()
                self._preempted_at = self._at
                self.preemptions += 1
            if scheduler.prefill:
                self._chunk = scheduler.chunk(self.chunk)
                limits.append(self._chunk.steps)
            if scheduler.running:
                limits.append(scheduler.next_end() - scheduler.step)
            if scheduler.admitted:
                self._count = pool.steps(scheduler.step, min(limits), scheduler.running)
                self._end = self._boundary(self._count)
        self._cut, self._due = self._count, self._end
        if self._commands:
            self._cut_at(self._commands[0][0])

    def _move(self, events: list[InstanceEvent]) -> None:
        """Leave the segment where it is cut."""
        self._planned = False
        start, self._at = self._at, self._due
        count = self._cut
        if not count:
            return
        scheduler, chunk = self._scheduler, self._chunk
        self.segments += 1
        self.busy_seconds += self._at - start
        self.generated_tokens += scheduler.running * count
        if chunk:
            self.prefilled_tokens += chunk.tokens * count
            if chunk.partial:
                chunk.partial.left = chunk.left - chunk.taken * count
        scheduler.go(count)
        for request in scheduler.finish():
            events.append(Finished(request, self._at))
        if chunk and chunk.filled:
            scheduler.join(chunk.filled)
        self._chunk = None

    def _boundary(self, count: int) -> float:
        """The time after ``count`` steps of the segment: the one formula for all its boundaries."""
        scheduler, prefilled = self._scheduler, self._chunk.tokens if self._chunk else 0
        return self._at + self.cost.steps(count, scheduler.running, scheduler.context, prefilled) / self.speed

    def _first_at(self, time: float) -> int:
        """The first boundary of the segment at or after ``time``, which lies between its start and its end."""
        scheduler, chunk = self._scheduler, self._chunk
        square = self.cost.per_context_token * scheduler.running / 2  # i steps take square * i**2 + linear * i
        linear = self.cost.step(scheduler.running, scheduler.context, chunk.tokens if chunk else 0) - square
        seconds = (time - self._at) * self.speed
        count = math.ceil(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))
        count = min(count, self._count)
        while count and self._boundary(count - 1) >= time:  # the root is off by rounding, by a step or two
            count -= 1
        while self._boundary(count) < time:
            count += 1
        return count

    def _cut_at(self, time: float) -> None:
        """Let the segment end where a command that arrives at ``time`` applies."""
        if not self._count:
            self._due = time
        elif time <= self._at:
            self._cut, self._due = 0, self._at
        elif time < self._end:
            self._cut = self._first_at(time)
            self._due = self._boundary(self._cut)

    def _steps_done(self, now: float) -> int:
        if not self._planned or not self._count or now <= self._at:
            return 0
        if now >= self._end:
            raise ValueError(f"state at {now} asked for, with events due at {self._end}; call advance({now}) first")
        count = self._first_at(now)
        return count if self._boundary(count) <= now else count - 1

    # Commands, as they arrive and as they apply at the boundary `_at`.

    def _tick(self, now: float) -> None:
        if now < self._clock:
            raise ValueError(f"time {now} is before {self._clock}, which came earlier; give times in order")
        self._clock = now

    def _command(self, now: float, act: Callable[[Any, list[InstanceEvent]], None], what: Any) -> None:
        if self._planned and not self._commands:
            self._cut_at(now)
        self._commands.append((now, act, what))

    def _enqueue(self, seat: Seat, _: list[InstanceEvent]) -> None:
        self._scheduler.waiting[seat] = None

    def _remove(self, names: tuple[str, ...], events: list[InstanceEvent]) -> None:
        scheduler = self._scheduler
        for name in names:
            seat = scheduler.seats.get(name)
            if seat in scheduler.waiting:
                del scheduler.waiting[seat]
            elif seat in scheduler.admitted:
                scheduler.release(seat)
            else:
                continue  # not here, or submitted by a later command
            scheduler.forget(seat)
            events.append(Interrupted(seat.request, self._at))

    def _stop(self, _: None, events: list[InstanceEvent]) -> None:
        self.paused = True
        events.append(Paused(self._at))

    def _restart(self, _: None, __: list[InstanceEvent]) -> None:
        if self.paused:
            self.paused = False
            self._scheduler.invalidate()

    def _change_speed(self, factor: float, _: list[InstanceEvent]) -> None:
        self.speed = factor


def _checked_speed(factor: float) -> float:
    if not 0 < factor < math.inf:
        raise ValueError(f"speed is {factor}; it must be positive (pause or crash the instance to stop it)")
    return factor
