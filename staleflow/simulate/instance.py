"""A rollout instance under simulation: continuous batching whose work does not depend on the number of tokens.

It behaves as an engine that goes step by step. At a step boundary it applies the commands that have arrived, admits
waiting requests in order, and preempts the most recently admitted ones if the key/value cache would overflow. The
step then decodes a token for each running request and prefills up to ``chunk`` tokens in order. As long as nobody
joins or leaves, all that is arithmetic, so the instance jumps from one change to the next: a *segment* of equal steps
whose end is known in closed form. A command that arrives inside a segment cuts it at the next boundary. Nothing is
ever undone::

    instance = Instance(cost, kv_blocks=20_000)
    instance.submit(0.0, Request("t1", "g1", prompt=512, generated=0, target=1500))
    events = instance.advance(instance.next_event())

Time is a parameter and never decreases. ``advance(now)`` leaves a boundary at ``now`` itself open, so that what is
decided at that instant applies there; ``next_event()`` starts the step. A command that then still comes at the time
of that boundary applies there too, except that a boundary that has preempted admits nobody else while anyone is left.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from staleflow.coordinator.cost import CostModel
from staleflow.simulate.kv import Batch, Chunk, Request, Seat

__all__ = ["Event", "Finished", "Instance", "Interrupted", "Load", "Paused", "Request"]


class Finished(NamedTuple):
    request: Request
    time: float


class Interrupted(NamedTuple):
    request: Request
    time: float


class Paused(NamedTuple):
    time: float


Event = Finished | Interrupted | Paused


class Load(NamedTuple):
    """What an instance has to do, at a step boundary."""

    running: int
    prefilling: int
    waiting: int
    context_tokens: int  # of the running requests, a shared prompt counted for each
    kv_used: int  # in tokens, whole blocks
    kv_free: int
    generated_tokens: int  # since the start
    prefilled_tokens: int  # since the start


_Command = tuple[float, Callable[[Any, list[Event]], None], Any]  # when it arrived, what it does, and to what


class Instance:
    """See the module. The public counts hold at the last boundary that was processed; ``load(now)`` at ``now``.

    Either ``_planned`` is false, and the instance stands at the boundary ``_at``; or it is in a segment of ``_count``
    steps from ``_at`` to ``_end`` (no steps and no end: idle or paused), of which it will make ``_cut``, until
    ``_due``. Until then ``_batch`` stays what it was at ``_at``.
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
        self.prefill_seconds = 0.0  # of these: steps that only prefill, and what prefill adds to the others
        self.segments = 0
        self._batch = Batch(kv_blocks, block)
        self._commands: deque[_Command] = deque()
        self._clock = -math.inf
        self._preempted_at = -math.inf
        self._planned = False
        self._at = -math.inf
        self._count = self._cut = 0
        self._end = self._due = math.inf
        self._chunk: Chunk | None = None

    # Commands. They wait for the next boundary.

    def submit(self, now: float, request: Request) -> None:
        self._tick(now)
        self._command(now, self._enqueue, self._batch.seat(request))

    def interrupt(self, now: float, names: Iterable[str]) -> None:
        """Have them leave with the tokens they have then; names that are not here are ignored."""
        self._tick(now)
        self._command(now, self._remove, tuple(names))

    def pause(self, now: float) -> None:
        """Stop stepping; answered by ``Paused``."""
        self._tick(now)
        self._command(now, self._stop, None)

    def resume(self, now: float) -> None:
        """Go on with other weights: everyone admitted is prefilled again. Ignored if not paused."""
        self._tick(now)
        self._command(now, self._restart, None)

    def set_speed(self, now: float, factor: float) -> None:
        """Divide the time of all further steps by ``factor``, relative to the cost model."""
        self._tick(now)
        self._command(now, self._change_speed, _checked_speed(factor))

    def crash(self, now: float) -> list[Request]:
        """Lose everything at once; the requests, in the order of submission, with the tokens of the last whole step.

        Call ``advance(now)`` first. What is left is an empty instance that runs at speed 1; its totals go on.
        """
        self._tick(now)
        batch, load = self._batch, self.load(now)
        for name, generated in list(self.progress(now)):
            batch.seats[name].request.generated = generated
        self.generated_tokens = load.generated_tokens
        self.prefilled_tokens = load.prefilled_tokens
        if self._planned and self._count:
            self.busy_seconds += now - self._at
        self._batch = Batch(batch.pool.capacity, batch.pool.block)
        self._commands.clear()
        self._planned = self.paused = False
        self._at = now
        self.speed = 1.0
        return [seat.request for seat in batch.seats.values()]

    # Time.

    def next_event(self) -> float:
        """When there is next something to apply or to report; infinity if nothing happens without a command."""
        if not self._planned:
            if self._commands and self._commands[0][0] <= self._at:
                return self._at
            self._plan()
        return self._due

    def advance(self, now: float) -> list[Event]:
        """Go on up to and including ``now``; what happened, by time, and at one time finished requests first."""
        self._tick(now)
        events: list[Event] = []
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

    # What there is.

    @property
    def running(self) -> int:
        return self._batch.running

    @property
    def prefilling(self) -> int:
        return len(self._batch.prefill)

    @property
    def waiting(self) -> int:
        return len(self._batch.seats) - len(self._batch.admitted)

    @property
    def context_tokens(self) -> int:
        return self._batch.context

    @property
    def prefilling_tokens(self) -> int:
        """Of those that are prefilled."""
        return self._batch.filling

    @property
    def kv_total(self) -> int:
        return self._batch.pool.capacity * self._batch.pool.block

    @property
    def kv_used(self) -> int:
        return self._batch.pool.used * self._batch.pool.block

    @property
    def kv_free(self) -> int:
        return self.kv_total - self.kv_used

    def load(self, now: float) -> Load:
        """The state at the last boundary up to ``now``, in constant time; call ``advance(now)`` first."""
        steps = self._steps_done(now)
        if not steps:
            return self.load_at_last_step()
        pool, running = self._batch.pool, self._batch.running
        grown_kv = pool.growth(self._batch.step, steps, running) * pool.block
        return Load(
            running=running,
            prefilling=self.prefilling,
            waiting=self.waiting,
            context_tokens=self.context_tokens + running * steps,
            kv_used=self.kv_used + grown_kv,
            kv_free=self.kv_free - grown_kv,
            generated_tokens=self.generated_tokens + running * steps,
            prefilled_tokens=self.prefilled_tokens + (self._chunk.tokens * steps if self._chunk else 0),
        )

    def load_at_last_step(self) -> Load:
        """The state at the boundary where somebody last joined or left: a little old, and very cheap."""
        return Load(
            running=self.running,
            prefilling=self.prefilling,
            waiting=self.waiting,
            context_tokens=self.context_tokens,
            kv_used=self.kv_used,
            kv_free=self.kv_free,
            generated_tokens=self.generated_tokens,
            prefilled_tokens=self.prefilled_tokens,
        )

    def progress(self, now: float) -> Iterator[tuple[str, int]]:
        """Name and generated tokens of each request, in the order of submission; otherwise as ``load``."""
        step = self._batch.step + self._steps_done(now)
        for name, seat in self._batch.seats.items():
            request = seat.request
            yield name, request.generated if seat.end < 0 else request.target - (seat.end - step)

    def generated(self, name: str, now: float) -> int:
        """The generated tokens of one request that is here; otherwise as ``load``."""
        seat = self._batch.seats[name]
        request = seat.request
        if seat.end < 0:
            return request.generated
        return request.target - (seat.end - self._batch.step - self._steps_done(now))

    def requests(self) -> list[Request]:
        """In the order of submission; what they have generated may be out of date."""
        return [seat.request for seat in self._batch.seats.values()]

    # Segments.

    def _plan(self) -> None:
        """Admit and preempt at this boundary, then find how many steps it takes until somebody joins or leaves."""
        self._planned = True
        batch, pool = self._batch, self._batch.pool
        self._count, self._end, self._chunk = 0, math.inf, None
        if not self.paused:
            limits: list[int] = []
            if batch.waiting:
                if self._at > self._preempted_at or not batch.admitted:
                    batch.admit(self.max_running)
                else:
                    limits.append(1)  # the next boundary may admit again
            while pool.overfull(batch.step):
                batch.preempt()
                self._preempted_at = self._at
                self.preemptions += 1
            if batch.prefill:
                self._chunk = batch.chunk(self.chunk)
                limits.append(self._chunk.steps)
            if batch.running:
                limits.append(batch.next_end() - batch.step)
            if batch.admitted:
                self._count = pool.steps(batch.step, min(limits), batch.running)
                self._end = self._boundary(self._count)
        self._cut, self._due = self._count, self._end
        if self._commands:
            self._cut_at(self._commands[0][0])

    def _move(self, events: list[Event]) -> None:
        """Leave the segment where it is cut."""
        self._planned = False
        start, self._at = self._at, self._due
        count = self._cut
        if not count:
            return
        batch, chunk = self._batch, self._chunk
        self.segments += 1
        self.busy_seconds += self._at - start
        self.generated_tokens += batch.running * count
        if chunk:
            self.prefilled_tokens += chunk.tokens * count
            self.prefill_seconds += (
                self.cost.per_prefill_token * chunk.tokens * count / self.speed if batch.running else self._at - start
            )
            if chunk.partial:
                chunk.partial.left = chunk.left - chunk.taken * count
        batch.go(count)
        for request in batch.finish():
            events.append(Finished(request, self._at))
        if chunk and chunk.filled:
            batch.join(chunk.filled)
        self._chunk = None

    def _boundary(self, count: int) -> float:
        """The time after ``count`` steps of the segment: the one formula for all its boundaries."""
        batch, chunk = self._batch, self._chunk
        return (
            self._at + self.cost.steps(count, batch.running, batch.context, chunk.tokens if chunk else 0) / self.speed
        )

    def _first_at(self, time: float) -> int:
        """The first boundary of the segment at or after ``time``, which lies between its start and its end."""
        batch, chunk = self._batch, self._chunk
        square = self.cost.per_context_token * batch.running / 2  # i steps take square * i**2 + linear * i
        linear = self.cost.step(batch.running, batch.context, chunk.tokens if chunk else 0) - square
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

    def _command(self, now: float, act: Callable[[Any, list[Event]], None], what: Any) -> None:
        if self._planned and not self._commands:
            self._cut_at(now)
        self._commands.append((now, act, what))

    def _enqueue(self, seat: Seat, _: list[Event]) -> None:
        self._batch.waiting[seat] = None

    def _remove(self, names: tuple[str, ...], events: list[Event]) -> None:
        batch = self._batch
        for name in names:
            seat = batch.seats.get(name)
            if seat in batch.waiting:
                del batch.waiting[seat]
            elif seat in batch.admitted:
                batch.release(seat)
            else:
                continue  # not here, or submitted by a later command
            batch.forget(seat)
            events.append(Interrupted(seat.request, self._at))

    def _stop(self, _: None, events: list[Event]) -> None:
        self.paused = True
        events.append(Paused(self._at))

    def _restart(self, _: None, __: list[Event]) -> None:
        if self.paused:
            self.paused = False
            self._batch.invalidate()

    def _change_speed(self, factor: float, _: list[Event]) -> None:
        self.speed = factor


def _checked_speed(factor: float) -> float:
    if not 0 < factor < math.inf:
        raise ValueError(f"speed is {factor}; it must be positive (pause or crash the instance to stop it)")
    return factor
