"""``fleet.jsonl``: what the trainer and every instance were doing, about once a second, for those who look.

    log = FleetLog(run.fleet, on_trouble=print)
    if log.due(now, len(instances), watched): log.write(Moment(...))
    for moment in read_fleet(run.fleet): moment.time, moment.instances[0].running      # oldest first

The journal has every event, but not the load of instances between them: that is here. The log is bounded
(``bounded_log.py``): large fleets are looked at less often. On a full disk nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from staleflow.observe.status import InstanceStatus, Status
from staleflow.run.bounded_log import MOST_BYTES, BoundedLog, read_lines

PERIOD_S = 1.0
WATCHED_S = 0.4
"""While somebody looks."""
PER_SECOND = 50
"""Instances that are written per second; of more, each less often."""

Doing = Literal["", "down", "pulling", "leaving"]


class InstanceMoment(msgspec.Struct, array_like=True, frozen=True):
    name: str
    version: int
    """-1 before the first pull."""
    running: int
    waiting: int
    kv_used: int
    """Tokens."""
    kv_total: int
    tokens: int
    """Made so far, by this incarnation."""
    doing: Doing = ""
    """Empty: it decodes, or has nothing to do."""


class Moment(msgspec.Struct, omit_defaults=True, frozen=True):
    """One line."""

    time: float
    """Seconds of training, as in ``metrics.jsonl``."""
    at: float = 0.0
    """Seconds since 1970; 0 in a simulated run."""
    doing: str = ""
    """What the run does before and after training."""
    trainer: str = ""
    waiting_for: str = ""
    """What the open step waits for."""
    notes: tuple[str, ...] = ()
    """The latest of what went wrong and was put right."""
    instances: tuple[InstanceMoment, ...] = ()


class FleetLog:
    def __init__(self, path: Path, on_trouble: Callable[[str], None], most_bytes: int = MOST_BYTES) -> None:
        self._log = BoundedLog(path, on_trouble, "the load of instances is not kept until it can", most_bytes)
        self._next = float("-inf")

    def due(self, now: float, instances: int, watched: bool = False) -> bool:
        """Whether enough time has passed since the last moment that was due."""
        if now < self._next:
            return False
        self._next = now + (WATCHED_S if watched else max(PERIOD_S, instances / PER_SECOND))
        return True

    def write(self, moment: Moment) -> None:
        self._log.write(msgspec.json.encode(moment) + b"\n")


def read_fleet(path: Path) -> Iterator[Moment]:
    return read_lines(path, Moment)


def simulated(path: Path) -> bool:
    """Whether it was recorded under the virtual clock."""
    first = next(read_fleet(path), None)
    return first is not None and not first.at


def moment_of(status: Status, at: float) -> Moment:
    return Moment(
        round(status.seconds, 3),
        round(at, 3),
        status.doing,
        status.trainer_doing,
        status.waiting_for,
        status.notes,
        tuple(_instance(each, began=not status.doing) for each in status.instances),
    )


def _instance(each: InstanceStatus, began: bool) -> InstanceMoment:
    """``began``: the run trains; before that, instances are not members of it."""
    doing: Doing = "leaving" if each.leaving else "pulling" if each.pulling else ""
    if began and not each.alive:
        doing = "down"
    load = each.running, each.waiting, each.kv_used, each.kv_total, each.tokens
    return InstanceMoment(each.name, -1 if each.version is None else each.version, *load, doing)
