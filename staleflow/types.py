"""The vocabulary of StaleFlow: the values its parts hand to each other.

A *group* is one prompt with all its trajectories. *Version* ``t`` is the model after ``t`` updates; *step* ``t``
trains on version ``t`` and makes ``t + 1``. A group's *deadline* is the last step that may still train on it.
"""

from dataclasses import dataclass, field
from typing import Literal, TypedDict

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
