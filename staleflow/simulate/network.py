"""The network between the control plane and the instances. It loses nothing for good, but it may be late.

Messages arrive at once, until there is trouble. In trouble a message may be delayed (so that a later one overtakes it),
delivered twice, or lost and sent again after ``RETRY_S``, as a transport that resends does.
"""

from collections.abc import Callable, Sequence
from random import Random

from staleflow.runtime.ports import Fence, Snapshot, Work
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.rollout import SimRollout

RETRY_S = 5.0


class Network:
    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self._loop = loop
        self._random = random
        self._trouble_until = 0.0

    def trouble(self, seconds: float) -> None:
        self._trouble_until = self._loop.now + seconds

    def send(self, deliver: Callable[..., None], *message: object) -> None:
        if self._loop.now >= self._trouble_until:
            deliver(*message)
            return
        fate = self._random.random()
        delay = RETRY_S if fate < 0.2 else self._random.uniform(0.0, 2.0)
        self._loop.at(self._loop.now + delay, deliver, *message)
        if fate > 0.7:
            self._loop.at(self._loop.now + self._random.uniform(0.0, 4.0), deliver, *message)


class Remote:
    """An instance at the other end of the network."""

    def __init__(self, rollout: SimRollout, network: Network) -> None:
        self.name = rollout.name
        self.rollout = rollout
        self._network = network

    def submit(self, fence: Fence, work: Sequence[Work]) -> None:
        self._network.send(self.rollout.submit, fence, work)

    def interrupt(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._network.send(self.rollout.interrupt, fence, names)

    def abort(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._network.send(self.rollout.abort, fence, names)

    def pull(self, fence: Fence, version: int) -> None:
        self._network.send(self.rollout.pull, fence, version)

    def snapshot(self) -> Snapshot:
        return self.rollout.snapshot()

    def held(self) -> list[tuple[str, int]]:
        return self.rollout.held()
