"""The vocabulary of StaleFlow: the values its parts hand to each other.

A *group* is one prompt with all its trajectories. *Version* ``t`` is the model after ``t`` updates; *step* ``t``
trains on version ``t`` and makes ``t + 1``. A group's *deadline* is the last step that may still train on it.
"""

from dataclasses import dataclass, field
from typing import Literal, TypedDict

import msgspec

Spans = tuple[tuple[int, int], ...]
"""Runs of tokens made under one version: ``(version, count)``, in the order they were made."""

StepState = Literal["open", "ready", "stuck"]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on: its groups, earliest deadline first and then in the order they were completed.

    ``aborted`` names the groups that were given up so that the step could be trained now. It is empty unless the
    ledger works with redundancy. They are no longer tracked: cancel whatever still runs for them.
    """

    step: int
    groups: list[str]
    aborted: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as the paper draws it: a buffer with places for groups. Derived for people, never stored.

    ``open``: there is a place left. ``ready``: enough complete groups to train. ``stuck``: every place is taken,
    and the step waits for the groups in ``waiting_for``.
    """

    step: int
    state: StepState
    groups: list[str]
    waiting_for: list[str]


class LedgerCounts(TypedDict):
    """``admitted = live + committed + sum(released.values())``; ``live`` includes ``complete`` and ``leased``."""

    admitted: int
    live: int
    complete: int
    leased: int
    committed: int
    released: dict[str, int]


# What the control plane and the processes of a run say to each other. Arrays are little-endian bytes
# (``servers/payloads.py``). Weights do not come this way: they go through the parameter server.

Role = Literal["instance", "trainer", "evaluator"]


class Setup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message: what the process is to be."""

    role: Role
    name: str
    run: str
    """The run's directory."""
    model: str
    """A folder in Hugging Face format."""
    store: str
    """The parameter server's name, in the run's registry."""
    cores: list[int]
    threads: int
    nice: int
    checkpoint: str = ""
    """What the trainer goes on from; empty: the model."""
    standby: bool = False
    """A trainer of this life of the run died: go on from what it published, if it had published anything."""


class Ordered(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A command to an instance, with its fence: term, life, number."""

    fence: tuple[int, int, int]


class Job(msgspec.Struct, array_like=True, frozen=True):
    """One trajectory for an instance, with what was generated so far."""

    trajectory: str
    epoch: int
    group: str
    prompt: bytes
    tokens: bytes
    logprobs: bytes
    spans: Spans


class Submit(Ordered, frozen=True):
    jobs: list[Job]


class Interrupt(Ordered, frozen=True):
    names: list[tuple[str, int]]


class Abort(Ordered, frozen=True):
    names: list[tuple[str, int]]


class Pull(Ordered, frozen=True):
    version: int


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End in good order."""


class Told(msgspec.Struct, array_like=True, frozen=True):
    """What an instance says of one trajectory: its tokens from ``start`` on."""

    trajectory: str
    epoch: int
    spans: Spans
    start: int
    tokens: bytes
    logprobs: bytes


class Load(msgspec.Struct, array_like=True, frozen=True):
    """An instance after the command ``applied``."""

    applied: tuple[int, int, int]
    version: int
    running: int
    waiting: int
    context: int
    kv_free: int
    kv_total: int
    max_running: int
    step: tuple[int, int, float] | None
    generated: int
    """Tokens since it started."""
    busy_s: float
    """Seconds in which it decoded, since it started."""


class Cell(msgspec.Struct, array_like=True, frozen=True):
    """Alike steps of an engine, summed up."""

    mixed: bool
    """Whether they prefilled as well."""
    count: int
    running: int
    context: int
    prefilled: int
    seconds: float
    cpu_s: float


class Costs(msgspec.Struct, array_like=True, frozen=True):
    """What an instance has measured since it last said so."""

    cells: list[Cell] = []
    pulls: int = 0
    pull_s: float = 0.0
    told: int = 0
    """Finished trajectories that it told of."""
    told_s: float = 0.0
    """How long they had waited for that, in all."""


class News(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A report and a snapshot."""

    load: Load
    finished: list[Told] = []
    returned: list[Told] = []
    progress: list[Told] = []
    failed: list[tuple[str, int, str]] = []
    """(trajectory, epoch, why): the engine cannot serve it."""
    pulled: int | None = None
    costs: Costs = Costs()


class TrainRow(msgspec.Struct, array_like=True, frozen=True):
    """One trajectory for the trainer. Members of a group have the same prompt, which is sent with the group."""

    name: str
    tokens: bytes
    logprobs: bytes
    spans: Spans
    reward: float


class TrainGroup(msgspec.Struct, array_like=True, frozen=True):
    prompt: bytes
    rows: list[TrainRow]


class Feed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    step: int
    groups: list[TrainGroup]


class Finish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    step: int


class Reset(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Forget what was fed since the last update."""


class Save(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write a checkpoint of the present version into this folder, and this beside it."""

    folder: str
    also: dict[str, bytes]


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The process has loaded everything and holds this version."""

    version: int


class Pushed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    version: int


class Trained(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a step was like: sent when its version can be pulled, right before ``Pushed``."""

    step: int
    facts: dict[str, float]
    token_staleness: dict[int, int]
    trajectory_staleness: dict[int, int]
    busy_s: float
    """Seconds of work on this step."""
    idle_s: float
    """Seconds of waiting for its groups."""


class Saved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    folder: str
    version: int


class Evaluate(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Score the newest version on the held-out problems, now or when next told to do something now."""

    now: bool = True


class Evaluated(msgspec.Struct, tag=True, array_like=True, frozen=True):
    version: int
    accuracy: float | None
    """Over the responses that could be scored; None if none could."""
    seconds: float
    failed: int
    """Responses that could not be scored."""
    why: str
    """Of the last of these."""


class Broken(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The process cannot go on, and starting it again would not help."""

    why: str


ToProcess = Setup | Submit | Interrupt | Abort | Pull | Feed | Finish | Reset | Save | Evaluate | Stop
FromProcess = Ready | News | Pushed | Trained | Saved | Evaluated | Broken
