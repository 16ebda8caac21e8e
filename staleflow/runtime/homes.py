"""Where episodes had their last turns. Nothing is held for them there, but what was computed may still be.

An instance keeps the KV entries of a turn that ended as a cached prefix, until others need the memory or its weights
change. So the next turn has a *home*, which saves its prefill; and memory that is free now may soon be wanted by those
who return. Both are prices for routing, and rules for nobody: an episode that waits can go anywhere. ::

    homes.turned(member, "p7/3", spans, context)
    homes.of("p7/3", members)                   # ("i1", 512): where, and how many tokens may still be there
    homes.returning(server, members)            # {"i1": 2048}: of those that wait for their environments
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from staleflow.runtime.fleet import Member
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Spans


class _Place(NamedTuple):
    instance: str
    incarnation: int
    version: int
    context: int


class Homes:
    def __init__(self) -> None:
        self.turn_tokens = 0.0
        """Made tokens of a turn: a moving average."""
        self._places: dict[str, _Place] = {}

    def turned(self, member: Member, name: str, spans: Spans, context: int) -> None:
        made = _last(spans)
        self.turn_tokens = self.turn_tokens + 0.05 * (made - self.turn_tokens) if self.turn_tokens else float(made)
        self._places[name] = _Place(member.name, member.incarnation, spans[-1][0] if spans else -1, context)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._places.pop(name, None)

    def of(self, name: str, members: Mapping[str, Member]) -> tuple[str, int]:
        place = self._places.get(name)
        if place is None or not _still_there(place, members.get(place.instance)):
            return "", 0
        return place.instance, place.context

    def returning(self, server: TrajectoryServer, members: Mapping[str, Member]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, place in self._places.items():
            each = server.trajectories.get(name)
            if each is not None and each.state == "waiting" and _still_there(place, members.get(place.instance)):
                found[place.instance] = found.get(place.instance, 0) + place.context
        return found


def _still_there(place: _Place, member: Member | None) -> bool:
    """Whether what was computed may be: with other weights, or in a new process, it is not."""
    return (
        member is not None
        and member.open
        and member.pulling is None
        and (member.incarnation, member.version) == (place.incarnation, place.version)
    )


def _last(spans: Spans) -> int:
    """Made tokens behind the last given ones."""
    made = 0
    for version, count in reversed(spans):
        if version < 0:
            break
        made += count
    return made
