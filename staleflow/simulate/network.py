"""What lies between the parts: one channel for each direction, each of which may be in trouble on its own.

A message arrives at once, except in times of trouble: then it may be late, held back until the trouble is over, lost
and sent again, or delivered twice. It is never lost for good while both ends live. When one end dies its channels are
``cut``: what is on its way arrives nowhere, or still does, as what lies in the buffer of a socket.

The trainer's channels keep their order and repeat nothing, as sockets: it does what it hears. Between the control plane
and instances or reward workers messages also overtake each other and come twice, which is more than sockets do to them:
commands have numbers, reports epochs, and answers names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from staleflow.runtime.ports import Heard
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.rollout import SimRollout
from staleflow.types import Command

Route = Literal["commands", "reports", "to trainer", "from trainer", "to rewards", "from rewards"]

RETRY_S = 5.0

TROUBLES: dict[str, Callable[[Random, float], tuple[float, ...]]] = {
    "late": lambda random, _: (random.uniform(0, 2),),
    "very late": lambda random, _: (90 * random.random() ** 4,),
    "held back": lambda _, left: (left,),
    "lost and sent again": lambda random, _: (RETRY_S * (random.random() < 0.4),),
    "repeated": lambda random, _: (random.uniform(0, 2), random.uniform(0, 20)),
}
"""After how many seconds each copy of a message arrives, by the seconds that are left of the trouble."""


@dataclass(slots=True)
class Channel:
    loop: VirtualLoop
    random: Random
    ordered: bool
    _trouble: str = ""
    _until: float = 0.0
    _last: float = 0.0
    """When the latest that is under way is due."""
    _under_way: int = 0
    _cuts: int = 0

    def trouble(self, kind: str, seconds: float) -> None:
        self._trouble, self._until = kind, self.loop.now + seconds

    @property
    def clear(self) -> bool:
        """Whether what is sent now arrives at once."""
        return self.loop.now >= self._until and not (self.ordered and self._under_way)

    def send(self, deliver: Callable[..., None], *message: object) -> None:
        if self.clear:
            deliver(*message)
            return
        now, left = self.loop.now, self._until - self.loop.now
        copies = TROUBLES[self._trouble](self.random, left) if left > 0 else (0.0,)
        for delay in copies[:1] if self.ordered else copies:
            arrives = max(now + delay, self._last) if self.ordered else now + delay
            self._last = max(self._last, arrives)
            self._under_way += 1
            self.loop.at(arrives, self._arrive, self._cuts, deliver, message)

    def cut(self) -> None:
        """One end is gone: what is on its way arrives nowhere, and the next connection is a new one."""
        self._cuts += 1
        self._until, self._last, self._under_way = 0.0, 0.0, 0

    def _arrive(self, cuts: int, deliver: Callable[..., None], message: tuple[object, ...]) -> None:
        if cuts == self._cuts:
            self._under_way -= 1
            deliver(*message)


class Network:
    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self._loop = loop
        self._random = random
        self._channels: dict[tuple[Route, str], Channel] = {}

    def channel(self, route: Route, instance: str = "") -> Channel:
        key = route, instance
        if (found := self._channels.get(key)) is None:
            found = self._channels[key] = Channel(self._loop, self._random, ordered="trainer" in route)
        return found

    def channels(self, *routes: Route) -> Iterator[Channel]:
        """Those of these routes, or all."""
        return (channel for (route, _), channel in self._channels.items() if not routes or route in routes)


class Remote:
    """An instance at the other end of the network."""

    def __init__(self, rollout: SimRollout, network: Network) -> None:
        self.name = rollout.name
        self.held = rollout.held
        self._rollout = rollout
        self._commands = network.channel("commands", rollout.name)
        self._reports = network.channel("reports", rollout.name)
        self._heard = rollout.heard()

    def send(self, command: Command) -> None:
        self._commands.send(self._rollout.send, command)

    def heard(self) -> Heard:
        """What has come through: while reports are late, what is known of the instance grows old."""
        if self._reports.clear:
            self._heard = self._rollout.heard()
        return self._heard
