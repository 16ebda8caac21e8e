"""What the HTTP API answers, as types: ``docs/dash.md`` describes them for those who write against it."""

from __future__ import annotations

from typing import Any

import msgspec

from staleflow.dash.steps import Ages
from staleflow.run.samples import Sample
from staleflow.types import Spans


class Heads(msgspec.Struct):
    """How much there is: where a number has changed, a view has something new."""

    steps: int
    samples: int
    trajectories: int
    """That ended."""
    behind: int
    """Events that the index has not read yet."""


class RunInfo(msgspec.Struct):
    id: int
    name: str
    path: str
    state: str
    """As ``staleflow runs`` says: running, finished, stopped, resumable, failed."""
    simulated: bool
    step: int
    """Steps made."""
    steps: int
    bound: int
    groups: int
    """Of a step."""
    group_size: int
    model: str
    trouble: str
    heads: Heads


class GroupCell(msgspec.Struct, array_like=True):
    """A group in a step's buffer."""

    name: str
    state: str
    """``trained`` (by the trainer, now), ``complete``, ``scoring``, ``decoding``, ``waiting`` (for an instance)."""
    version: int
    """The version it is reserved with."""
    scored: int
    needed: int
    tokens: int


class Buffer(msgspec.Struct):
    step: int
    state: str
    """``open``, ``ready``, ``stuck``, or ``training``."""
    places: int
    cells: list[GroupCell]
    more: int
    """Groups beyond those in ``cells``."""


class Blocker(msgspec.Struct):
    """A trajectory that the open step waits for."""

    name: str
    state: str
    instance: str
    tokens: int


class InstanceNow(msgspec.Struct):
    name: str
    version: int | None
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    tokens_per_s: float
    doing: str


class Now(msgspec.Struct):
    info: RunInfo
    time: float
    at: float
    """When it was recorded, in seconds since 1970; 0 in a simulated run."""
    doing: str
    trainer: str
    waiting_for: str
    blocked_since: float | None
    """Since when the open step has waited for groups that no later step may train."""
    blockers: list[Blocker]
    buffers: list[Buffer]
    instances: list[InstanceNow]
    more_instances: int
    queued: int
    """Trajectories that wait for an instance."""
    scoring: int
    notes: list[str]
    reward: float | None
    accuracy: float | None
    tokens_trained: int
    tokens_wasted: int


class Learning(msgspec.Struct):
    series: dict[str, list[float | None]]
    """Of each number in ``metrics.jsonl``, one value for each point; ``step`` and ``time`` are among them."""
    accuracy: list[tuple[int, float]]
    """Held-out accuracy by version."""


class Bin(msgspec.Struct, array_like=True):
    tokens: int
    """The shortest length in it."""
    offered: int
    trained: int


class Staleness(msgspec.Struct):
    bound: int
    ages: Ages
    lengths: list[Bin]
    wasted: dict[str, int]
    """Tokens of trajectories that were given up, by reason."""
    released: dict[str, int]
    """Groups that were given up, by reason."""
    wasted_at: list[tuple[int, dict[str, int]]]
    """The same tokens by the version that was being trained."""


class LaneMark(msgspec.Struct, array_like=True):
    """Events of one kind that are too close to be told apart in the window."""

    time: float
    kind: str
    value: str
    """Of the first of them."""
    count: int


class Lane(msgspec.Struct):
    name: str
    cells: list[tuple[int, int, str] | None]
    """Running, version, and what it did otherwise, for each column; null: it was not there."""
    marks: list[LaneMark]


class Timeline(msgspec.Struct):
    begin: float
    end: float
    first: float
    """Of all that is recorded."""
    last: float
    most: int
    """Sequences on the fullest instance in this window."""
    lanes: list[Lane]
    instances: int
    """In all; ``lanes`` has those that were asked for."""
    trainer: list[tuple[float, float, int, float, float]]
    """Its steps: begin, end, step, seconds of work and of waiting in it."""
    evaluations: list[tuple[float, float, int, float]]
    """Begin, end, version, accuracy."""
    events: list[LaneMark]
    """Of the run: restarts, faults, changes of the number of instances."""


class Found(msgspec.Struct):
    samples: list[Sample]
    before: int
    """To continue with; 0: that was all."""


class Listed(msgspec.Struct):
    trajectories: list[dict[str, Any]]
    """The fields of ``Ended``."""
    before: int


class Event(msgspec.Struct, array_like=True):
    time: float
    kind: str
    text: str


class Stay(msgspec.Struct):
    """From one placement to the next."""

    instance: str
    begin: float
    end: float | None
    spans: Spans
    """Tokens made there, by version."""
    why: str
    """How it ended."""


class Life(msgspec.Struct):
    name: str
    group: str
    state: str
    step: int | None
    reason: str
    reward: float | None
    tokens: int
    admitted: float
    generated: float | None
    scored: float | None
    ended: float | None
    stays: list[Stay]
    events: list[Event]
    members: list[tuple[str, str, int, float | None]]
    """Of its group, as far as they are known: name, state, tokens, reward."""
    sample: Sample | None
