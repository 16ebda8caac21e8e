"""The network between the control plane and the instances. It loses nothing for good, but it may be late.

Messages arrive at once, until there is trouble. In trouble a message may be delayed (so that a later one overtakes it),
delivered twice, or lost and sent again after ``RETRY_S``, as a transport that resends does.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from staleflow.runtime.ports import Fence, Snapshot, Work
from staleflow.simulate.rollout import SimRollout

RETRY_S = 5.0


class Network:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._trouble_until = 0.0

    def trouble(self, seconds: float) -> None:
        self._trouble_until = asyncio.get_running_loop().time() + seconds

    def send(self, deliver: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._trouble_until:
            deliver()
            return
        fate = self._random.random()
        delay = RETRY_S if fate < 0.2 else self._random.uniform(0.0, 2.0)
        loop.call_later(delay, deliver)
        if fate > 0.7:
            loop.call_later(self._random.uniform(0.0, 4.0), deliver)


class Remote:
    """An instance at the other end of the network."""

    def __init__(self, rollout: SimRollout, network: Network) -> None:
        self.name = rollout.name
        self.rollout = rollout
        self._network = network

    def submit(self, fence: Fence, work: Sequence[Work]) -> None:
        self._network.send(lambda: self.rollout.submit(fence, work))

    def interrupt(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._network.send(lambda: self.rollout.interrupt(fence, names))

    def abort(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._network.send(lambda: self.rollout.abort(fence, names))

    def pull(self, fence: Fence, version: int) -> None:
        self._network.send(lambda: self.rollout.pull(fence, version))

    def snapshot(self) -> Snapshot:
        return self.rollout.snapshot()

    def held(self) -> list[tuple[str, int]]:
        return self.rollout.held()
