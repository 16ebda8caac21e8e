"""Which complete groups are not worth training on: the setting ``filter``.

A filter is ``filter(group, **arguments) -> str | None``: a short reason to replace the group, or None to train on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from staleflow.errors import shown
from staleflow.registry import Entry, Registry

if TYPE_CHECKING:
    from staleflow.servers.lifecycle import Group

FILTERS = Registry(
    "filter",
    {"none": Entry("staleflow.servers.filters:keep_all"), "no-signal": Entry("staleflow.servers.filters:no_signal")},
    takes=("group",),
)
NO_SIGNAL = "no signal"


def check_reason(reason: object, group: Group) -> None:
    del group
    if reason is not None and not (isinstance(reason, str) and reason):
        raise ValueError(f"{shown(reason)}: return a short reason to replace the group, or None to keep it")


def keep_all(group: Group) -> str | None:  # noqa: ARG001
    return None


def no_signal(group: Group) -> str | None:
    """Replace groups whose rewards are all equal: they teach nothing."""
    rewards = {member.reward for member in group.members if member.state == "complete"}
    return NO_SIGNAL if len(rewards) <= 1 else None
