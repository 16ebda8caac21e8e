"""The port: all that the control plane knows of engines, trainer, reward workers and the data.

The simulator's fakes and the real parts stand behind the same few methods. Commands go out through these objects;
what comes back are calls of ``ControlPlane``'s ``on_...`` methods, which are safe to repeat and to delay.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import Chunk
from staleflow.types import Spans


class Fence(NamedTuple):
    """Which command: from which life of the control plane, to which life of the instance, and its number, from 1.

    An instance applies the commands to its own life in order and without gaps, and none of an earlier life of the
    control plane once it has heard of a later one.
    """

    term: int
    life: int
    number: int


class Work(NamedTuple):
    """One trajectory for an instance, with what was generated so far."""

    trajectory: str
    epoch: int
    group: str
    prompt_tokens: int
    spans: Spans


class Snapshot(NamedTuple):
    """An instance as it was at ``time``, after the command ``applied``."""

    time: float
    life: int
    """Counts restarts of the instance. A new life has forgotten everything."""
    applied: Fence
    version: int
    """-1 before the first pull."""
    running: int
    waiting: int
    context: int
    kv_free: int
    kv_total: int
    max_running: int
    step: tuple[int, int, float] | None = None
    """The latest decoding step: sequences, tokens of context, seconds. None if there was none."""


class Report(NamedTuple):
    """What an instance has to say: trajectories that ended or came back, tokens so far, a finished pull."""

    instance: str
    life: int
    finished: tuple[tuple[str, int, Spans], ...] = ()
    """(trajectory, epoch, spans)"""
    returned: tuple[tuple[str, int, Spans], ...] = ()
    progress: tuple[tuple[str, int, Spans], ...] = ()
    failed: tuple[tuple[str, int, str], ...] = ()
    """(trajectory, epoch, why): its engine cannot serve it."""
    pulled: int | None = None
    chunks: Mapping[str, Chunk] = MappingProxyType({})
    """By trajectory: the tokens that the server does not know yet. None where engines are only modelled."""


class InstancePort(Protocol):
    name: str

    def submit(self, fence: Fence, work: Sequence[Work]) -> None: ...
    def interrupt(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        """Return these trajectories (name, epoch) at the next step boundary. Unknown ones are ignored."""
        ...

    def abort(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        """Drop these trajectories."""
        ...

    def pull(self, fence: Fence, version: int) -> None:
        """Load ``version`` between two decoding steps; every request is kept."""
        ...

    def snapshot(self) -> Snapshot:
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
