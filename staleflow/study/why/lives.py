"""The lives of groups and trajectories, put together from the events of a stretch of the journal.

lives = Lives()
for each in read_events(directory, about=["p17", "p17/0"]): lives.hear(each)
lives.groups["p17"].step, lives.trajectories["p17/0"].spells(until=40.0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from staleflow.run.events import Timed
from staleflow.servers.book import group_name
from staleflow.types import episode_of

Doing = Literal["waits for an instance", "decoding", "played by its environment", "being scored"]


class Spell(NamedTuple):
    """A stretch of time in which one thing happened to a trajectory."""

    doing: Doing
    begin: float
    end: float
    instance: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def where(self) -> str:
        return f"{self.doing} on {self.instance}" if self.instance else self.doing

    def within(self, begin: float, end: float) -> float:
        return max(0.0, min(self.end, end) - max(self.begin, begin))


@dataclass(slots=True)
class TrajectoryLife:
    name: str
    marks: list[tuple[float, str, Any]] = field(default_factory=list[tuple[float, str, Any]])
    """Time, kind of event, and its last value, in order."""
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.spans)

    @property
    def moves(self) -> int:
        return max(0, sum(kind == "route" for _, kind, _ in self.marks) - 1)

    def at(self, kind: str) -> float | None:
        """When that happened to it last."""
        return next((time for time, each, _ in reversed(self.marks) if each == kind), None)

    def spells(self, until: float) -> list[Spell]:
        """What happened to it, one after the other; ``until``: now, if it has not ended."""
        found: list[Spell] = []
        doing, begin, instance = None, 0.0, ""
        for time, kind, value in self.marks:
            if doing is not None and kind in _ENDS:
                found.append(Spell(doing, begin, time, instance))
                doing = None
            if kind in _BEGINS:
                doing, begin, instance = _BEGINS[kind], time, value if kind == "route" else ""
        if doing is not None and until > begin:
            found.append(Spell(doing, begin, until, instance))
        return found


_BEGINS: dict[str, Doing] = {
    "reserve": "waits for an instance",
    "requeue": "waits for an instance",
    "misreport": "waits for an instance",
    "route": "decoding",
    "generated": "being scored",
    "turn": "played by its environment",
    "again": "played by its environment",
    "given": "waits for an instance",
}
_ENDS = frozenset([*_BEGINS, "score", "release", "surplus"])


@dataclass(slots=True)
class GroupLife:
    name: str
    members: dict[str, TrajectoryLife] = field(default_factory=dict[str, TrajectoryLife])
    version: int | None = None
    admitted: float | None = None
    reserved: float | None = None
    completed: float | None = None
    leased: float | None = None
    released: tuple[float, str, bool] | None = None
    """When, why, and whether its prompt is drawn again."""
    step: int | None = None
    """That trained it."""

    @property
    def last(self) -> TrajectoryLife | None:
        """The member that was scored last, or has come least far."""
        if not self.members:
            return None
        return max(self.members.values(), key=lambda each: each.at("score") or float("inf"))

    @property
    def live(self) -> bool:
        return self.released is None and self.step is None


class Lives:
    def __init__(self, events: Iterable[Timed] = (), least_time: float = 0.0) -> None:
        """``least_time``: of events before the first time in what is read."""
        self.groups: dict[str, GroupLife] = {}
        self.trajectories: dict[str, TrajectoryLife] = {}
        self.time = least_time
        self.commits: dict[int, float] = {}
        self._leased: list[str] = []
        for each in events:
            self.hear(each)

    def hear(self, each: Timed) -> None:
        time = self.time = max(self.time, each.time)
        match each.event:
            case ("admit", int(prompt), int(attempt), *_):
                self.group(group_name(prompt, attempt)).admitted = time
            case ("reserve" | "lower" | "renew" as kind, str(name), int(version)):
                group = self.group(name)
                group.version = version
                if kind == "reserve":
                    group.reserved = time
            case ("route", str(name), str(instance), _):
                life = self.trajectory(name)
                if not life.marks and (reserved := self.group(_group_of(name)).reserved) is not None:
                    life.marks.append((reserved, "reserve", None))
                life.marks.append((time, "route", instance))
            case ("stream", str(name), spans):
                self.trajectory(name).spans = spans
            case ("generated", str(name), spans):
                life = self.trajectory(name)
                life.spans = spans
                life.marks.append((time, "generated", None))
            case ("turn", str(name), spans, reason):
                life = self.trajectory(name)
                life.spans = spans
                life.marks.append((time, "turn", reason))
            case ("given", str(name), int(count), _):
                self.trajectory(name).marks.append((time, "given", count))
            case ("ended" | "again" as kind, str(name), value, *_):
                for life in self.group(_group_of(name)).members.values():
                    if episode_of(life.name) == name:
                        life.marks.append((time, "score" if kind == "ended" else kind, value))
            case ("interrupt" | "requeue" | "score" | "misreport" as kind, str(name), *rest):
                self.trajectory(name).marks.append((time, kind, rest[-1] if rest else None))
            case ("occupy", str(name)):
                group = self.group(name)
                group.completed = time
                for member in group.members.values():
                    if member.at("score") is None:
                        member.marks.append((time, "surplus", None))
            case ("release", str(name), reason, again):
                group = self.group(name)
                group.released = time, reason, bool(again)
                for member in group.members.values():
                    member.marks.append((time, "release", reason))
            case ("lease", names):
                self._lease(names, time)
            case ("consume", names, aborted):
                self._lease([name for name in names if name not in self._leased], time)
                for name in aborted:
                    self.group(name).released = time, "redundant", True
            case ("rollback", _):
                self._leased = []
            case ("commit", int(step)):
                self.commits[step] = time
                for name in self._leased:
                    self.group(name).step = step
                self._leased = []
            case _:
                pass

    def _lease(self, names: Iterable[str], time: float) -> None:
        for name in names:
            self.group(name).leased = time
            self._leased.append(name)

    @property
    def leased(self) -> list[str]:
        """Groups of the open step."""
        return list(self._leased)

    def of_step(self, step: int) -> list[GroupLife]:
        return [group for group in self.groups.values() if group.step == step]

    def group(self, name: str) -> GroupLife:
        if name not in self.groups:
            self.groups[name] = GroupLife(name)
        return self.groups[name]

    def trajectory(self, name: str) -> TrajectoryLife:
        if name not in self.trajectories:
            life = self.trajectories[name] = TrajectoryLife(name)
            self.group(_group_of(name)).members[name] = life
        return self.trajectories[name]


def _group_of(trajectory: str) -> str:
    return trajectory.rpartition("/")[0]
