"""Nobody is told of an event before it is durable.

The journal commits in groups, a few milliseconds behind the control plane. What the control plane says meanwhile waits
here, in order, until the journal has caught up with everything that was written before it was said. So whatever an
instance, the trainer or a reward worker has ever heard is known to the next life of the control plane as well.

    outbox = Outbox(journal)
    journal.on_durable = lambda: loop.call_soon_threadsafe(outbox.release)
    control = ControlPlane(settings, server, HeldTrainer(trainer, outbox), HeldRewards(rewards, outbox), prompts)
    control.join(HeldInstance(instance, outbox))
"""

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
        position = self._journal.position
        if self._closed:
            return
        if not self._waiting and position <= self._journal.durable:
            deliver(*message)
        else:
            self._waiting.append((position, deliver, message))
            self._journal.hurry()

    def release(self) -> None:
        """Send what rests on nothing but durable events."""
        while self._waiting and self._waiting[0][0] <= self._journal.durable:
            _, deliver, message = self._waiting.popleft()
            deliver(*message)

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
    def __init__(self, port: TrainerPort, outbox: Outbox) -> None:
        self._port = port
        self._outbox = outbox

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        self._outbox.send(self._port.feed, step, groups)

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
