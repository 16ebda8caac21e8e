"""The trainer under simulation: seconds for each token, an update, and a push before a version can be served."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from staleflow.servers.lifecycle import Group
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.weights import SimWeights


@dataclass(frozen=True, slots=True)
class TrainerCost:
    per_token_s: float
    """Seconds for each prompt and output token, on all training GPUs together."""
    fixed_s: float = 0.0
    """Seconds for each step: the optimiser's update."""
    push_s: float = 0.0

    def train_s(self, tokens: float) -> float:
        return self.per_token_s * tokens


class SimTrainer:
    """Trains groups in the order in which they are fed. ``reason`` names what it waits for when it runs dry."""

    def __init__(
        self,
        loop: VirtualLoop,
        cost: TrainerCost,
        weights: SimWeights,
        pushed: Callable[[int], None],
        reason: Callable[[], str],
    ) -> None:
        self._loop = loop
        self.cost = cost
        self.weights = weights
        self.idle: dict[str, float] = {}
        self.alive = True
        self._pushed = pushed
        self._reason = reason
        self._free_at = 0.0
        self._dry: tuple[float, str] | None = (0.0, "start")
        self._resets = 0
        self._die_after_push: Callable[[], None] | None = None
        self.announce_s = 0.0
        """Seconds from when a version can be pulled to its announcement."""

    def feed(self, step: int, groups: Sequence[Group]) -> None:  # noqa: ARG002  # a step's groups cost the same in any step
        now = self._loop.now
        if not groups or not self.alive:
            return
        if self._dry is not None:
            since, why = self._dry
            self.idle[why] = self.idle.get(why, 0.0) + now - since
            self._dry = None
        tokens = sum(member.context for group in groups for member in group.members if member.state == "complete")
        self._free_at = max(self._free_at, now) + self.cost.train_s(tokens)
        self._loop.at(self._free_at, self._look, self._resets, self._free_at)

    def finish(self, step: int) -> None:
        if not self.alive:
            return
        done = max(self._free_at, self._loop.now) + self.cost.fixed_s
        self._free_at = done
        self._loop.at(done, self._push, self._resets, step)

    def reset(self) -> None:
        """Drop what was fed: timers set before no longer count."""
        now = self._loop.now
        self._resets += 1
        self._free_at = now
        if self._dry is None:
            self._dry = (now, "restart")

    def die(self, after_push: bool, died: Callable[[], None]) -> None:
        """Die now, or right after the next push, before it is announced."""
        if after_push:
            self._die_after_push = died
        else:
            self.alive = False
            self.reset()
            died()

    def start_again(self) -> None:
        self.alive = True

    def durable(self) -> int:
        return self.weights.version

    def _push(self, resets: int, step: int) -> None:
        if resets == self._resets:
            self._loop.at(self._loop.now + self.cost.push_s, self._publish, resets, step)
            self._dry = (self._loop.now, "push")

    def _publish(self, resets: int, step: int) -> None:
        if resets == self._resets:
            self.weights.version = step + 1
            if self._dry is not None and self._dry[1] == "push":
                self.idle["push"] = self.idle.get("push", 0.0) + self._loop.now - self._dry[0]
            self._dry = (self._loop.now, self._reason())
            if died := self._die_after_push:
                self._die_after_push = None
                self.die(False, died)
            elif self.announce_s:
                self._loop.at(self._loop.now + self.announce_s, self._pushed, step + 1)
            else:
                self._pushed(step + 1)

    def _look(self, resets: int, expected: float) -> None:
        """The queue has run dry unless something was fed meanwhile."""
        if resets == self._resets and expected == self._free_at and self._dry is None:
            self._dry = (self._loop.now, self._reason())
