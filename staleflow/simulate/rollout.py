"""A rollout worker under simulation: the modelled engine behind the port that real workers implement.

It stamps tokens with the version that made them, pulls weights between two steps, reports what ended or came back, and
answers for its state. It can also crash, hang, slow down and start again, which is what the fault tests are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from staleflow.runtime.ports import Fence, Report, Snapshot, Work
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.instance import Finished, Instance, Interrupted, Load, Request
from staleflow.simulate.weights import SimWeights
from staleflow.types import Spans

STREAM_S = 0.5
"""A worker tells the server about new tokens this often; what a crash loses is younger."""


HEARTBEAT_S = 10.0
"""A snapshot is made when something has happened, and otherwise this often."""


@dataclass(slots=True)
class _Held:
    """A trajectory on this worker. Tokens beyond ``marked`` are of the worker's present version."""

    trajectory: str
    epoch: int
    spans: Spans
    marked: int
    began: int
    """Tokens it came with."""

    def stamped(self, generated: int, version: int) -> Spans:
        fresh = generated - self.marked
        if fresh <= 0:
            return self.spans
        if self.spans and self.spans[-1][0] == version:
            return (*self.spans[:-1], (version, self.spans[-1][1] + fresh))
        return (*self.spans, (version, fresh))


class SimRollout:
    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        engine: Instance,
        weights: SimWeights,
        target_of: Callable[[Work], int],
        report: Callable[[Report], None],
        left: Callable[[str, int], None],
    ) -> None:
        self.name = name
        self._loop = loop
        self.engine = engine
        self.version = -1
        self.life = 0
        self.up = True
        self.pulls = 0
        self.pull_seconds = 0.0
        self.born = loop.now
        self.down_seconds = 0.0
        """Dead or hung, as far as it has come back."""
        self._down_since = 0.0
        self._weights = weights
        self._target_of = target_of
        self._report = report
        self._left = left
        self._held: dict[str, _Held] = {}
        self._aborting: set[str] = set()
        self._applied = Fence(0, 0, 0)
        self._pulling: int | None = None
        self._pull_began = 0.0
        self._pull_next = -1
        """A version that was asked for during a pull: loaded before any step is made."""
        self._armed = math.inf
        self._hung_until = 0.0
        self._early: dict[Fence, Callable[[], None]] = {}
        self._last: Snapshot | None = None
        self._news = True
        """Whether something has happened since the last snapshot."""

    # The port

    def submit(self, fence: Fence, work: Sequence[Work]) -> None:
        self._receive(fence, lambda: self._submit(work))

    def interrupt(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._receive(fence, lambda: self._leave(names, abort=False))

    def abort(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._receive(fence, lambda: self._leave(names, abort=True))

    def pull(self, fence: Fence, version: int) -> None:
        self._receive(fence, lambda: self._pull(version))

    def snapshot(self) -> Snapshot:
        now = self._loop.now
        last = self._last
        if last is not None and (
            not self.up or now < self._hung_until or (not self._news and now - last.time < HEARTBEAT_S)
        ):
            return last
        recent = (
            self._news and last is not None
        ) or self._armed <= now  # an event of this very instant is still to come
        load = self.engine.load_at_last_step() if recent else self.engine.load(now)
        self._news = False
        self._last = Snapshot(
            time=now,
            life=self.life,
            applied=self._applied,
            version=self.version,
            running=load.running + load.prefilling,
            waiting=load.waiting,
            context=max(load.context_tokens, load.kv_used),
            kv_free=load.kv_free,
            kv_total=load.kv_used + load.kv_free,
            max_running=self.engine.max_running,
            step=self._step(load),
        )
        return self._last

    def _step(self, load: Load) -> tuple[int, int, float] | None:
        """What a step takes here now, as a worker would measure it."""
        if not load.running:
            return None
        seconds = self.engine.cost.step(load.running, load.context_tokens) / self.engine.speed
        return load.running, load.context_tokens, seconds

    def held(self) -> list[tuple[str, int]]:
        return [(held.trajectory, held.epoch) for held in self._held.values()]

    def generated_tokens(self) -> int:
        """All tokens ever made here."""
        return self.engine.load(self._loop.now).generated_tokens

    def on_engine(self) -> int:
        """Tokens made here for trajectories that are still here."""
        began = {name: held.began for name, held in self._held.items()}
        return sum(generated - began[name] for name, generated in self.engine.progress(self._loop.now))

    def stream(self) -> None:
        """Tell the server how far everything here has come, as a worker does all the time."""
        if self.up and self._pulling is None and self._loop.now >= self._hung_until:
            self._stream()
            self._arm()

    # Faults

    def crash(self) -> None:
        """Die. The server knows the tokens up to the last stream; the others are lost."""
        if not self.up:
            return
        self.snapshot()
        self._stream()
        now = self._loop.now
        for request in self.engine.crash(now):
            held = self._held[request.name]
            self._left(held.trajectory, request.generated - held.began)
        self.up, self._pulling, self._down_since = False, None, now
        self._held, self._aborting, self._early = {}, set(), {}

    def _stream(self) -> None:
        """Send what a worker that streams every ``STREAM_S`` would have sent by now.

        Nobody looks at these tokens unless the worker falls silent or a version is published, so they are sent only
        then.
        """
        self._fire_events()
        now = self._loop.now
        load = self.engine.load(now)
        step = self.engine.cost.step(load.running, load.context_tokens) / self.engine.speed if load.running else 1.0
        unsent = math.ceil((now % STREAM_S) / step)
        progress: list[tuple[str, int, Spans]] = []
        for name, generated in self.engine.progress(now):
            held = self._held[name]
            sent = max(held.marked, generated - unsent)
            if sent > held.marked:
                progress.append((held.trajectory, held.epoch, held.stamped(sent, self.version)))
        self._report(Report(self.name, self.life, progress=tuple(progress)))

    def restart(self) -> None:
        """Begin a new life, with empty memory and no weights."""
        self.life += 1
        self.down_seconds += self._loop.now - self._down_since
        self.up, self.version, self._applied = True, -1, Fence(0, self.life, 0)
        self._news = True

    def hang(self, seconds: float) -> None:
        """Answer nothing and do nothing for a while; commands wait."""
        if self.up and self._pulling is None and self._loop.now >= self._hung_until:
            self.snapshot()
            self._stream()
            self._hung_until = self._loop.now + seconds
            self.down_seconds += seconds
            self.engine.pause(self._loop.now)
            self._arm()
            self._loop.at(self._hung_until, self._wake, self.life)

    def slow_down(self, factor: float) -> None:
        if self.up:
            self.engine.set_speed(self._loop.now, factor)
            self._arm()

    # Commands, once they are listened to

    def _receive(self, fence: Fence, command: Callable[[], None]) -> None:
        """Keep the command until it is its turn: messages may come late, twice or in another order."""
        if not self.up or fence.life != self.life or fence <= self._applied:
            return
        self._early[fence] = command
        if self._loop.now >= self._hung_until:
            self._obey()

    def _obey(self) -> None:
        term = max((fence.term for fence in self._early), default=0)
        if term > self._applied.term:
            self._applied = Fence(term, self.life, 0)
        while command := self._early.pop(due := self._applied._replace(number=self._applied.number + 1), None):
            self._applied = due
            command()
        self._early = {fence: command for fence, command in self._early.items() if fence > self._applied}
        self._arm()

    def _submit(self, work: Sequence[Work]) -> None:
        now = self._loop.now
        for each in work:
            generated = sum(count for _, count in each.spans)
            name = life_of(each.trajectory, each.epoch)
            self._held[name] = _Held(each.trajectory, each.epoch, each.spans, generated, generated)
            target = self._target_of(each)
            self.engine.submit(now, Request(name, each.group, each.prompt_tokens, generated, target))

    def _leave(self, names: Sequence[tuple[str, int]], abort: bool) -> None:
        known = [name for name in (life_of(*each) for each in names) if name in self._held]
        if abort:
            self._aborting.update(known)
        if known:
            self.engine.interrupt(self._loop.now, known)

    def _pull(self, version: int) -> None:
        if self._pulling is not None:
            self._pull_next = max(self._pull_next, version)
        elif version > self.version:
            self._pulling, self._pull_began = version, self._loop.now
            self.engine.pause(self._loop.now)
        else:
            self._report(Report(self.name, self.life, pulled=self.version))

    # Time

    def _arm(self) -> None:
        self._news = True
        due = self.engine.next_event()
        if due < self._armed:
            self._armed = due
            self._loop.at(max(due, self._loop.now), self._fire, due)

    def _fire(self, due: float) -> None:
        if due != self._armed:
            return
        self._armed = math.inf
        self._fire_events()
        self._arm()

    def _fire_events(self) -> None:
        finished: list[tuple[str, int, Spans]] = []
        returned: list[tuple[str, int, Spans]] = []
        paused = False
        for event in self.engine.advance(self._loop.now):
            if isinstance(event, (Finished, Interrupted)):
                request = event.request
                held = self._held.pop(request.name)
                self._left(held.trajectory, request.generated - held.began)
                if request.name in self._aborting:
                    self._aborting.discard(request.name)
                    continue
                row = (held.trajectory, held.epoch, held.stamped(request.generated, self.version))
                (finished if isinstance(event, Finished) else returned).append(row)
            else:
                paused = True
        if finished or returned:
            self._report(Report(self.name, self.life, finished=tuple(finished), returned=tuple(returned)))
        if paused and self._pulling is not None:
            self._weights.fetch(partial(self._pulled, self.life))

    def _pulled(self, life: int, version: int) -> None:
        """``version`` is loaded: the one that was asked for, or a later one, of which nobody need have heard yet."""
        if life != self.life or not self.up or self._pulling is None:
            return
        now = self._loop.now
        if now < self._hung_until:
            self._loop.at(self._hung_until, self._pulled, life, version)
            return
        progress: list[tuple[str, int, Spans]] = []
        for name, generated in self.engine.progress(now):
            held = self._held[name]
            if generated > held.marked:
                held.spans, held.marked = held.stamped(generated, self.version), generated
                progress.append((held.trajectory, held.epoch, held.spans))
        self.version, self._pulling = version, None
        self.pulls += 1
        self.pull_seconds += now - self._pull_began
        self._report(Report(self.name, self.life, progress=tuple(progress), pulled=self.version))
        if self._pull_next > self.version:
            self._pulling, self._pull_began = self._pull_next, now
            self._weights.fetch(partial(self._pulled, life))
        else:
            self.engine.resume(now)
        self._arm()

    def _wake(self, life: int) -> None:
        if life != self.life or not self.up:
            return
        if self._pulling is None:
            self.engine.resume(self._loop.now)
        self._obey()


def life_of(trajectory: str, epoch: int) -> str:
    """The engine's name for it. One that comes again is another request: the first may not have left yet."""
    return f"{trajectory}@{epoch}"
