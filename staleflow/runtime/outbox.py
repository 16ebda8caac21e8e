"""No part acts on an event before it is durable.

The journal commits in groups, a few milliseconds behind the control plane. What the control plane says meanwhile waits
here, in order, until the journal has caught up with everything that was written before it was said. So whatever an
instance, the trainer or a reward worker has done is known to the next term of the control plane as well.

    outbox = Outbox(journal)
    journal.on_durable = outbox.waker(loop)
    control = ControlPlane(settings, server, HeldTrainer(trainer, outbox), HeldRewards(rewards, outbox), prompts)
    control.join(HeldInstance(instance, outbox))
"""

from asyncio import AbstractEventLoop, get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from staleflow.runtime.ports import InstancePort, RewardPort, TrainerPort
from staleflow.servers.journal import Journal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.types import Command


class Outbox:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, deliver: Callable[..., None], *message: Any, held: bool = True) -> None:
        """When everything that has been written is durable. Without ``held`` now, or behind what waits: nothing comes
        of it that the next term of the control plane must know."""
        if self._closed:
            return
        position = self._journal.position if held else 0
        if not self._waiting and position <= self._journal.durable:
            deliver(*message)
            return
        self._waiting.append((position, deliver, message))
        if position > self._journal.durable:
            self._journal.hurry()
        else:
            self.release()  # it became durable just now, when nothing was waiting for it

    def release(self) -> None:
        """Send what rests on nothing but durable events."""
        while self._waiting and self._waiting[0][0] <= self._journal.durable:
            _, deliver, message = self._waiting.popleft()
            deliver(*message)

    def waker(self, loop: AbstractEventLoop) -> Callable[[], None]:
        """For the thread of a journal to call: releases in the loop, which is not woken up where nothing waits."""

        def wake() -> None:
            if self._waiting:
                loop.call_soon_threadsafe(self.release)

        return wake

    def close(self) -> None:
        """Send nothing any more."""
        self._closed = True
        self._waiting.clear()


class HeldInstance:
    """An instance whose commands wait until what they follow from is durable."""

    def __init__(self, port: InstancePort, outbox: Outbox) -> None:
        self.name = port.name
        self.heard = port.heard
        self.held = port.held
        self._port = port
        self._outbox = outbox

    def send(self, command: Command) -> None:
        self._outbox.send(self._port.send, command)


class HeldTrainer:
    """A trainer that ends no step before the step is durable.

    It gets groups at once: until ``finish`` they are only gradients in its memory, and the next term of the
    control plane begins with ``reset``.
    """

    def __init__(self, port: TrainerPort, outbox: Outbox, on_wait: Callable[[float], None] | None = None) -> None:
        """``on_wait`` is called with the seconds for which the end of a step waited for the journal."""
        self._port = port
        self._outbox = outbox
        self._on_wait = on_wait
        self._resets = 0

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        self._outbox.send(self._unless_reset, self._resets, self._port.feed, step, groups, held=False)

    def finish(self, step: int) -> None:
        if self._on_wait is not None:
            began = get_running_loop().time()
            self._outbox.send(lambda told: told(get_running_loop().time() - began), self._on_wait)
        self._outbox.send(self._unless_reset, self._resets, self._port.finish, step)

    def reset(self) -> None:
        self._resets += 1
        self._outbox.send(self._port.reset)

    def _unless_reset(self, resets: int, deliver: Callable[..., None], *message: Any) -> None:
        """What a reset would undo is not sent: the trainer that it was meant for may have died while it waited."""
        if resets == self._resets:
            deliver(*message)

    def durable(self) -> int:
        return self._port.durable()


class HeldRewards:
    def __init__(self, port: RewardPort, outbox: Outbox) -> None:
        self._port = port
        self._outbox = outbox

    def score(self, trajectory: Trajectory) -> None:
        self._outbox.send(self._port.score, trajectory)
