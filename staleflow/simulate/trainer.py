"""The trainer under simulation: seconds for each token, an update, and a push before a version can be served.

``SimTrainer`` is the process: it does what it hears, as ``workers/trainer.py``, and refuses what the real one refuses.
``TrainerLink`` is the control plane's port to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from staleflow.servers.lifecycle import Group
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.network import Channel
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


class Fed(NamedTuple):
    """One group, as the trainer gets it."""

    name: str
    prompt: int
    tokens: int


class TrainerError(AssertionError):
    """The trainer was told something that the real one would die of."""


class SimTrainer:
    """Trains groups in the order in which they are fed. ``reason`` names what it waits for when it runs dry."""

    def __init__(
        self,
        loop: VirtualLoop,
        cost: TrainerCost,
        batch_size: int,
        weights: SimWeights,
        pushed: Callable[[int], None],
        reason: Callable[[], str],
    ) -> None:
        self._loop = loop
        self.cost = cost
        self.weights = weights
        self.idle: dict[str, float] = {}
        self.alive = True
        self.incarnation = 0
        self.trained: dict[int, list[str]] = {}
        """The groups that each published step was made of."""
        self._batch_size = batch_size
        self._pushed = pushed
        self._reason = reason
        self._fed: list[str] = []
        self._finishing = False
        self._free_at = 0.0
        self._dry: tuple[float, str] | None = (0.0, "start")
        self._lives = 0
        """Deaths and resets: timers set before the last one no longer count."""
        self._on_rest: Callable[[int], None] | None = None
        self._die_after_push: Callable[[], None] | None = None
        self._hung_until = 0.0

    @property
    def at_rest(self) -> bool:
        return self.alive and not self._finishing

    # What it hears

    def feed(self, step: int, groups: Sequence[Fed]) -> None:
        if not self.alive:
            return
        if step != self.weights.version or self._finishing:
            raise TrainerError(f"groups of step {step} were fed while step {self.weights.version} is trained")
        if self._dry is not None:
            since, why = self._dry
            self.idle[why] = self.idle.get(why, 0.0) + self._loop.now - since
            self._dry = None
        self._fed += [group.name for group in groups]
        self._free_at = self._when_free() + self.cost.train_s(sum(group.tokens for group in groups))
        self._loop.at(self._free_at, self._look, self._lives, self._free_at)

    def finish(self, step: int) -> None:
        if not self.alive:
            return
        if step != self.weights.version or len(self._fed) != self._batch_size or self._finishing:
            raise TrainerError(f"step {step} cannot be finished: step {self.weights.version} has {self._fed}")
        self._finishing, self._free_at = True, self._when_free() + self.cost.fixed_s
        self._loop.at(self._free_at, self._push, self._lives, step)

    def reset(self) -> None:
        """Forget what was fed. An update under way is completed first, as by a process that hears one thing after the
        other: nobody may send this before it is known how that ended."""
        if not self.alive:
            return
        if self._finishing:
            raise TrainerError(f"a reset came while step {self.weights.version} is being finished")
        self._forget()

    def connected(self, at_rest: Callable[[int], None]) -> None:
        """A control plane is there. It hears which version this is once nothing is left to do of what one before it
        has said."""
        if not self.alive:
            return
        if self._finishing:
            self._on_rest = at_rest
        else:
            at_rest(self.weights.version)

    # What happens to it

    def die(self, after_push: bool, died: Callable[[], None]) -> None:
        """Die now, or right after the next push, before it is announced."""
        if after_push:
            self._die_after_push = died
        else:
            self.alive, self._on_rest = False, None
            self._forget()
            died()

    def start_again(self) -> None:
        self.alive, self._hung_until = True, 0.0
        self.incarnation += 1

    def hang(self, seconds: float) -> None:
        """Do nothing for a while; what is under way takes longer by that."""
        self._hung_until = max(self._hung_until, self._loop.now + seconds)

    # Within

    def _forget(self) -> None:
        now = self._loop.now
        self._lives += 1
        self._fed, self._finishing, self._free_at = [], False, now
        if self._dry is None:
            self._dry = (now, "restart")

    def _when_free(self) -> float:
        return max(self._free_at, self._hung_until, self._loop.now)

    def _push(self, lives: int, step: int) -> None:
        if lives != self._lives:
            return
        if self._loop.now < self._hung_until:
            self._loop.at(self._hung_until, self._push, lives, step)
            return
        self._loop.at(self._loop.now + self.cost.push_s, self._publish, lives, step)
        self._dry = (self._loop.now, "push")

    def _publish(self, lives: int, step: int) -> None:
        if lives != self._lives:
            return
        self.trained[step], self._fed, self._finishing = self._fed, [], False
        self.weights.version = step + 1
        if self._dry is not None and self._dry[1] == "push":
            self.idle["push"] = self.idle.get("push", 0.0) + self._loop.now - self._dry[0]
        self._dry = (self._loop.now, self._reason())
        if died := self._die_after_push:
            self._die_after_push = None
            self.die(False, died)
            return
        self._pushed(step + 1)
        if at_rest := self._on_rest:
            self._on_rest = None
            at_rest(step + 1)

    def _look(self, lives: int, expected: float) -> None:
        """The queue has run dry unless something was fed meanwhile."""
        if lives == self._lives and expected == self._free_at and self._dry is None:
            self._dry = (self._loop.now, self._reason())


class TrainerLink:
    """``TrainerPort`` of one control plane. It reaches only the trainer that it has heard of last."""

    def __init__(self, trainer: SimTrainer, channel: Channel, incarnation: int | None) -> None:
        self.incarnation = incarnation
        """Of the trainer; None until it has said that it is there."""
        self._trainer = trainer
        self._channel = channel

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        if groups:
            self._send(self._trainer.feed, step, [_fed(group) for group in groups])

    def finish(self, step: int) -> None:
        self._send(self._trainer.finish, step)

    def reset(self) -> None:
        self._send(self._trainer.reset)

    def durable(self) -> int:
        return self._trainer.weights.version

    def _send(self, deliver: Callable[..., None], *message: object) -> None:
        if self.incarnation == self._trainer.incarnation:
            self._channel.send(deliver, *message)


def _fed(group: Group) -> Fed:
    tokens = sum(member.context for member in group.members if member.state == "complete")
    return Fed(group.name, group.prompt, tokens)
