"""What the coordinator sees when it decides, and what it may decide.

A ``Situation`` is one consistent picture: the fleet as it will be once the commands already issued have taken effect
(the speculative state), the trajectories that wait in the server, the room that the ledger has for each version, and
what the open step waits for. Strategies are pure functions of it and return commands.

The fleet is a table of columns, one row for each instance, because strategies look at all instances at once::

    fleet = Fleet.of(["i0", "i1"], version=[3, 3], running=[12, 9], context=[40_000, 31_000], kv_free=[200_000, 90_000])
    fleet.running[fleet.version == 3]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from staleflow.coordinator.cost import CostModel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COLUMNS = ("version", "running", "waiting", "context", "kv_free", "max_running", "alive", "pulling", "speed")
KINDS: dict[str, Any] = {"alive": np.bool_, "pulling": np.bool_, "speed": np.float64}
UNREPORTED = {"version": -1, "max_running": 256, "alive": 1, "speed": 1.0}


@dataclass(slots=True)
class Fleet:
    """All instances, with the commands issued to them counted in."""

    names: list[str]
    version: Ints
    """The version after any pull in progress."""
    running: Ints
    """Sequences decoding or being prefilled."""
    waiting: Ints
    """Sequences that the instance holds but has no KV memory for: it is thrashing."""
    context: Ints
    """Tokens of context among those running."""
    kv_free: Ints
    """Tokens of KV memory left."""
    max_running: Ints
    alive: Bools
    pulling: Bools
    speed: Floats
    """How fast it decodes against the cost model, by its own measurements; 1 while unknown."""

    @classmethod
    def of(cls, names: Sequence[str], **given: Sequence[float]) -> Fleet:
        """Instances of these names. A column that is not given is that of instances which have reported nothing."""
        columns: list[Any] = [
            np.array(given.get(name, [UNREPORTED.get(name, 0)] * len(names)), KINDS.get(name, np.int64))
            for name in COLUMNS
        ]
        return cls(list(names), *columns)

    def copy(self) -> Fleet:
        """A working copy, for a strategy to count its own decisions in."""
        return Fleet(self.names, *(getattr(self, name).copy() for name in COLUMNS))

    def place(self, index: int, context: int, headroom: int) -> None:
        """Count in one more sequence of ``context`` tokens, with room to grow."""
        self.running[index] += 1
        self.context[index] += context
        self.kv_free[index] -= context + headroom

    def remove(self, index: int, context: int) -> None:
        """Count out a sequence of ``context`` tokens."""
        self.running[index] -= 1
        self.context[index] -= context
        self.kv_free[index] += context


class Queued(NamedTuple):
    """A trajectory in the server, waiting for an instance."""

    trajectory: str
    group: str
    context: int
    """Tokens to be prefilled: prompt and what was generated so far."""
    version: int | None
    """The version its group is reserved with; None if the group is not reserved (fresh)."""
    home: str = ""
    """The instance of its last turn, if what was computed there may still be there."""
    cached: int = 0
    """Tokens of its context that need no prefill there."""

    @property
    def level(self) -> float:
        """What the queue is ordered by: its version, or infinity if it is fresh."""
        return inf if self.version is None else self.version


class Resident(NamedTuple):
    """A trajectory on an instance, as far as the server knows."""

    trajectory: str
    group: str
    instance: int
    """Row in the fleet."""
    context: int
    generated: int
    version: int
    moves: int = 0
    """How often it has been migrated."""
    attempt: int = 0
    """How often its prompt has been drawn again."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How the run has been going: moving averages that the strategies may use. Zero while unknown."""

    step_s: float = 0.0
    """Time between two versions."""
    mean_tokens: float = 0.0
    """Output tokens of a finished trajectory."""
    grown_tokens: float = 0.0
    """Output tokens that a running trajectory has, on average over time: long ones run for longer."""
    longest_tokens: float = 0.0
    """Output tokens of the longest trajectory started under a version."""


@dataclass(slots=True)
class Situation:
    now: float
    newest: int
    """The newest version that instances can pull."""
    fleet: Fleet
    queue: list[Queued]
    """Reserved groups first, oldest version first; then fresh groups in the order of admission. Members of a group are
    next to each other."""
    room: dict[int, int]
    """For each version that an instance holds or could pull: how many more groups the ledger would admit."""
    cost: CostModel
    pull_s: float
    """Time for one instance to pull, by the latest measurement."""
    group_size: int
    max_staleness: int = 1
    batch_size: int = 0
    """Groups for each step; 0 if unknown."""
    pace: Pace = field(default_factory=Pace)
    blockers: list[Resident] = field(default_factory=list["Resident"])
    """Unfinished trajectories of the groups that the open step waits for."""
    thrashing: list[Resident] = field(default_factory=list["Resident"])
    """Trajectories waiting for KV memory inside an instance, latest first."""
    movable: list[Resident] = field(default_factory=list["Resident"])
    """Large trajectories on instances that are behind the newest version and hold more context than others there."""
    blocked_since: float | None = None
    """Since when the open step has had nothing else to wait for than the blockers."""
    turn: int = 0
    """Trajectories routed so far: where round robin continues."""
    mu: float | None = None
    """Waterfall: the least marginal gain that fits the run's own lengths; None: the configured one."""
    turn_tokens: float = 0.0
    """Where environments play: tokens that the model makes in a turn, on average."""
    returning: dict[str, int] = field(default_factory=dict[str, int])
    """By instance: context of episodes that had their last turn there and will come back from their environments."""

    @property
    def reserved(self) -> int:
        """How many of the queue belong to reserved groups; the fresh ones come after them."""
        return bisect_left(self.queue, inf, key=lambda item: item.level)


class Route(NamedTuple):
    """Send a queued trajectory to an instance; its tokens will be of ``version`` or newer."""

    trajectory: str
    group: str
    instance: str
    version: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Bring a trajectory back to the server, with its tokens."""

    trajectory: str
    instance: str
    why: str


@dataclass(frozen=True, slots=True)
class Pull:
    """Let an instance load ``version`` between two decoding steps."""

    instance: str
    version: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Give a group up; its prompt will be drawn again."""

    group: str
    why: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """End a trajectory where it is and score it."""

    trajectory: str
    instance: str


Command = Route | Interrupt | Pull | Abort | Truncate
