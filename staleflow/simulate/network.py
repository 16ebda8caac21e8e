"""The network between the control plane and the instances. It never loses a message for good, but may be late.

Messages arrive at once, except in times of trouble: then a message may be delayed (so that a later one overtakes it),
delivered twice, or lost and sent again after ``RETRY_S``, as by a transport that resends.
"""

from collections.abc import Callable
from random import Random

from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.rollout import SimRollout
from staleflow.types import Command

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
        self.heard = rollout.heard
        self.held = rollout.held
        self._rollout = rollout
        self._network = network

    def send(self, command: Command) -> None:
        self._network.send(self._rollout.send, command)
