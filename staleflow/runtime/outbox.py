"""Nobody acts on an event before it is durable.

The journal commits in groups, a few milliseconds behind the control plane. What the control plane says meanwhile waits
here, in order, until the journal has caught up with everything that was written before it was said. So whatever an
instance, the trainer or a reward worker has done is known to the next life of the control plane as well.

    outbox = Outbox(journal)
    journal.on_durable = outbox.waker(loop)
    control = ControlPlane(settings, server, HeldTrainer(trainer, outbox), HeldRewards(rewards, outbox), prompts)
    control.join(HeldInstance(instance, outbox))
"""

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from staleflow.runtime.ports import Fence, InstancePort, RewardPort, Snapshot, TrainerPort, Work
from staleflow.servers.journal import Journal
from staleflow.servers.lifecycle import Group, Trajectory


class Outbox:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, deliver: Callable[..., None], *message: Any) -> None:
        """When everything that has been written is durable."""
        self._behind(self._journal.position, deliver, message)

    def pass_on(self, deliver: Callable[..., None], *message: Any) -> None:
        """Now, or behind what waits: nothing comes of it that the next life of the control plane must know."""
        self._behind(0, deliver, message)

    def _behind(self, position: int, deliver: Callable[..., None], message: tuple[Any, ...]) -> None:
        if self._closed:
            return
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
    """An instance that hears of nothing that might be forgotten."""

    def __init__(self, port: InstancePort, outbox: Outbox) -> None:
        self.name = port.name
        self._port = port
        self._outbox = outbox

    def submit(self, fence: Fence, work: Sequence[Work]) -> None:
        self._outbox.send(self._port.submit, fence, work)

    def interrupt(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._outbox.send(self._port.interrupt, fence, names)

    def abort(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._outbox.send(self._port.abort, fence, names)

    def pull(self, fence: Fence, version: int) -> None:
        self._outbox.send(self._port.pull, fence, version)

    def snapshot(self) -> Snapshot:
        return self._port.snapshot()

    def held(self) -> list[tuple[str, int]]:
        return self._port.held()


class HeldTrainer:
    """A trainer that makes no version of anything that might be forgotten.

    It may hear of groups at once: until ``finish`` they are only gradients in its memory, and the next life of the
    control plane begins with ``reset``.
    """

    def __init__(self, port: TrainerPort, outbox: Outbox) -> None:
        self._port = port
        self._outbox = outbox

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        self._outbox.pass_on(self._port.feed, step, groups)

    def finish(self, step: int) -> None:
        self._outbox.send(self._port.finish, step)

    def reset(self) -> None:
        self._outbox.send(self._port.reset)

    def durable(self) -> int:
        return self._port.durable()


class HeldRewards:
    def __init__(self, port: RewardPort, outbox: Outbox) -> None:
        self._port = port
        self._outbox = outbox

    def score(self, trajectory: Trajectory) -> None:
        self._outbox.send(self._port.score, trajectory)
