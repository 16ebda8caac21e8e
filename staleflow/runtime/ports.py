"""The port: all that the control plane knows of engines, trainer, reward workers and the data.

The simulator's models and the real parts stand behind the same few methods. Commands go out through these objects;
what comes back are calls of ``ControlPlane``'s ``on_...`` methods, which are safe to repeat and to delay.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.types import Command, Fence, InstanceState


class Heard(NamedTuple):
    """An instance as it was at ``time``, after the command ``applied``."""

    time: float
    incarnation: int
    applied: Fence
    state: InstanceState


class InstancePort(Protocol):
    name: str

    def send(self, command: Command, /) -> None: ...

    def heard(self) -> Heard:
        """The latest that is known; a dead instance's grows old."""
        ...

    def held(self) -> list[tuple[str, int]]:
        """The trajectories (name, epoch) that it holds; asked after a restart of the control plane."""
        ...


class TrainerPort(Protocol):
    def feed(self, step: int, groups: Sequence[Group]) -> None:
        """Accumulate the gradients of these groups of ``step``."""
        ...

    def finish(self, step: int) -> None:
        """All groups of ``step`` have been fed: update, push, then ``on_pushed(step + 1)``."""
        ...

    def reset(self) -> None:
        """Forget everything that was fed since the last update."""
        ...

    def durable(self) -> int:
        """The newest version that is safe in the parameter server."""
        ...


class RewardPort(Protocol):
    def score(self, trajectory: Trajectory) -> None:
        """Score it and call ``on_scored`` or ``on_score_failed`` with its name."""
        ...
