"""From what the control plane knows to the ``Situation`` that strategies decide on.

watch = Watch(server, members, strategies, cost, pull_s=1.0)
watch.gauge.finished(tokens=120, version=3)        # as things happen
situation = watch.situation(now)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice

import numpy as np

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.routing import most_routes
from staleflow.coordinator.situation import Pace, Queued, Resident, Situation
from staleflow.coordinator.strategies import Strategies
from staleflow.protocol import Ledger
from staleflow.runtime.fleet import FleetTable, Member
from staleflow.runtime.homes import Homes
from staleflow.runtime.waiting import waits_for
from staleflow.servers.lifecycle import Trajectory
from staleflow.servers.trajectories import TrajectoryServer

MOST_QUEUED = 4096
"""One decision looks at no more trajectories than this."""

LEVELLING_S = 5.0
"""Where versions come faster than this, nothing is levelled: what moves waits for a decision or two."""
MOST_MOVABLE = 8
"""The largest trajectories of an instance that levelling may choose from: with more of them it is even enough."""
MOST_THRASHING = 2048
"""Trajectories without memory that one decision looks at, and no more than twice as many as it places."""
MOST_SOURCES = 512
"""The instances with the most context that levelling may take from: it moves half as many trajectories at a time."""


@dataclass(slots=True)
class Lengths:
    """Output tokens of the trajectories of one version."""

    count: int = 0
    total: int = 0
    squares: int = 0
    longest: int = 0


@dataclass(slots=True)
class Gauge:
    """Moving averages of how the run goes, from what has been observed.

    Lengths are averaged over all trajectories of a version, once the last one has ended: short ones end first.
    """

    pull_s: float
    step_s: float = 0.0
    mean_tokens: float = 0.0
    grown_tokens: float = 0.0
    longest_tokens: float = 0.0
    _published: dict[int, float] = field(default_factory=dict[int, float])
    _lengths: dict[int, Lengths] = field(default_factory=dict[int, Lengths])
    _pulls: dict[str, float] = field(default_factory=dict[str, float])

    def begin(self, now: float, version: int) -> None:
        """Steps are made from now on, the first one of this version."""
        self._published.setdefault(version, now)
        self._lengths.setdefault(version, Lengths())

    def pull_began(self, instance: str, now: float) -> None:
        self._pulls[instance] = now

    def pull_ended(self, instance: str, now: float) -> None:
        if (began := self._pulls.pop(instance, None)) is not None:
            self.pull_s += 0.1 * (now - began - self.pull_s)

    def committed(self, now: float, version: int, max_staleness: int) -> None:
        """``version`` can be served from now on; groups of versions that are too old for its step have all ended."""
        if version - 1 in self._published:
            self.step_s = blend(self.step_s, now - self._published[version - 1], 0.3)
        self._published[version] = now
        self._lengths[version] = Lengths()
        over = version - 1 - max_staleness
        self._published.pop(over, None)
        if (ended := self._lengths.pop(over, None)) is not None and ended.count:
            self.mean_tokens = blend(self.mean_tokens, ended.total / ended.count, 0.3)
            self.grown_tokens = blend(self.grown_tokens, ended.squares / (2 * ended.total), 0.3)
            self.longest_tokens = blend(self.longest_tokens, float(ended.longest), 0.3)

    def finished(self, tokens: int, version: int) -> None:
        """A trajectory of a group of ``version`` has ended."""
        if (lengths := self._lengths.get(version)) is not None:
            lengths.count += 1
            lengths.total += tokens
            lengths.squares += tokens * tokens
            lengths.longest = max(lengths.longest, tokens)

    def pace(self) -> Pace:
        return Pace(self.step_s, self.mean_tokens, self.grown_tokens, self.longest_tokens)


@dataclass(slots=True)
class Blocking:
    """What the open step waits for, and since when it has waited for nothing else."""

    count: int = 0
    groups: list[str] = field(default_factory=list[str])
    """Their names, where there are few."""
    since: float | None = None
    _were: set[str] = field(default_factory=set[str])
    _mark: object = None

    def update(self, ledger: Ledger, few: int, now: float) -> None:
        """There may be thousands in every cycle: they are looked at one by one only if one may have joined them."""
        in_training = ledger.frontier > ledger.version
        self.count, mark = (0, None) if in_training else ledger.blocked()
        if not self.count:
            self.since, self._were, self._mark = None, set(), None
        elif mark != self._mark:
            groups = ledger.blocking()
            if self.since is None or not self._were.issuperset(groups):
                self.since = now
            self._were, self._mark = set(groups), mark
        self.groups = ledger.blocking() if 0 < self.count <= few else []


class Line:
    """The queue as strategies see it. Entries of fresh groups are made once: most of them wait for many cycles."""

    def __init__(self) -> None:
        self._fresh: dict[str, list[Queued]] = {}

    def queue(
        self, server: TrajectoryServer, places: int, homes: Callable[[str], tuple[str, int]] | None = None
    ) -> list[Queued]:
        """What waits, no more than there are places for: members of reserved groups first, then fresh groups."""
        resuming, fresh = server.queue(places)
        line = [Queued(each.name, each.group.name, each.context, each.group.version) for each in resuming]
        if homes is not None:
            found = [homes(each.name) for each in resuming]
            line = [each._replace(home=home, cached=tokens) for each, (home, tokens) in zip(line, found, strict=True)]
        seen: dict[str, list[Queued]] = {}
        for group in fresh:
            if len(line) >= places:
                break
            entries = self._fresh.get(group.name)
            if entries is None or server.plays:
                queued = [each for each in group.members if each.state == "queued"]
                entries = [Queued(each.name, group.name, each.context, None) for each in queued]
            seen[group.name] = entries
            line += entries
        self._fresh = seen
        return line


def blend(old: float, new: float, share: float) -> float:
    return old + share * (new - old) if old else new


class Watch:
    """What is seen of a run beyond the state of the server: its pace, its fleet, and what holds the open step up."""

    def __init__(
        self,
        server: TrajectoryServer,
        members: Mapping[str, Member],
        strategies: Strategies,
        cost: CostModel,
        pull_s: float,
    ) -> None:
        self.gauge = Gauge(pull_s)
        self.blocking = Blocking()
        self.played: Callable[[str], str] = lambda _: "environment"
        """What an environment does with an episode, and for how long."""
        self.homes: Homes | None = None
        """Where environments play: where episodes had their last turns."""
        self.routed = 0
        """Trajectories sent to an instance so far."""
        self._server = server
        self._members = members
        self._strategies = strategies
        self._cost = cost
        self._line = Line()
        self._table: FleetTable | None = None

    def forget_table(self) -> None:
        """There are other instances than before."""
        self._table = None

    def reported(self, member: Member) -> None:
        """The instance has said something."""
        if self._table is not None:
            self._table.reported(member)
        else:
            member.touched = True

    @property
    def table(self) -> FleetTable:
        if self._table is None:
            self._table = FleetTable(list(self._members.values()), self._cost, self._strategies.headroom)
        return self._table

    def waits_for(self) -> str:
        """What the open step waits for, in a few words."""
        return waits_for(self._server, self.played)

    def stalled(self) -> str:
        """Why the run does not continue, in one line."""
        alive = sum(member.alive for member in self._members.values())
        step = self._server.ledger.version
        return f"step {step} waits for {self.waits_for()}; {alive} of {len(self._members)} instances are alive"

    def situation(self, now: float) -> Situation:
        """One consistent picture of this moment."""
        server, table, strategies, blocking = self._server, self.table, self._strategies, self.blocking
        ledger, fleet, pace = server.ledger, table.refresh(now), self.gauge.pace()
        homes, members = self.homes, self._members
        home_of = None if homes is None else lambda name: homes.of(name, members)
        versions = {version for version in fleet.version.tolist() if version >= 0} | {ledger.version}
        return Situation(
            now=now,
            newest=ledger.version,
            fleet=fleet,
            queue=self._line.queue(server, min(MOST_QUEUED, sum(table.places)), home_of),
            room={version: ledger.room(version) for version in versions},
            cost=self._cost,
            pull_s=self.gauge.pull_s,
            group_size=server.group_size,
            max_staleness=ledger.max_staleness,
            batch_size=ledger.batch_size,
            pace=pace,
            blockers=blockers(server, table.rows, blocking.groups),
            thrashing=thrashing(table, self.routed) if any(table.waiting) else [],
            movable=movable(table, ledger.version, pace.step_s) if strategies.migration == "gain" else [],
            blocked_since=blocking.since,
            turn=self.routed,
            turn_tokens=0.0 if homes is None else homes.turn_tokens,
            returning={} if homes is None else homes.returning(server, members),
        )


def blockers(server: TrajectoryServer, rows: dict[str, int], names: Sequence[str]) -> list[Resident]:
    """Unfinished trajectories of the groups that the open step waits for."""
    groups = [server.groups[name] for name in names]
    return [resident(each, rows) for group in groups for each in group.members if each.instance in rows]


def thrashing(table: FleetTable, turn: int) -> list[Resident]:
    """The latest arrivals on instances that hold more than they have KV memory for. Where there are too many to look
    at, from one of these instances on that ``turn`` stands for, so that each has its turn."""
    found: list[Resident] = []
    waiting = table.fleet.waiting * table.fleet.alive
    rows = np.flatnonzero(waiting)
    most = min(MOST_THRASHING, 2 * most_routes(len(table.members)))
    if waiting.sum() > most:
        rows = np.roll(rows, -(turn % len(rows)))
    for row in rows.tolist():
        if len(found) >= most:
            break
        latest = islice(reversed(table.members[row].residents.values()), int(waiting[row]))
        found += [resident(each, table.rows) for each in latest if each.state == "running"]
    return found


def movable(table: FleetTable, newest: int, step_s: float) -> list[Resident]:
    """The large trajectories on instances that hold more context than others which could pull now."""
    fleet = table.fleet
    if 0 < step_s < LEVELLING_S:
        return []
    behind = fleet.alive & ~fleet.pulling & (fleet.version < newest)
    if np.count_nonzero(behind) < 2:
        return []
    found: list[Resident] = []
    fuller = np.flatnonzero(behind & (fleet.context > fleet.context[behind].mean()))
    if len(fuller) > MOST_SOURCES:
        fuller = np.sort(fuller[np.argsort(-fleet.context[fuller], kind="stable")[:MOST_SOURCES]])
    for row in fuller.tolist():
        running = [each for each in table.members[row].residents.values() if each.state == "running"]
        largest = nlargest(MOST_MOVABLE, running, key=lambda each: each.context)
        found += [resident(each, table.rows) for each in largest]
    return found


def resident(trajectory: Trajectory, rows: dict[str, int]) -> Resident:
    assert trajectory.instance is not None
    return Resident(
        trajectory.name,
        trajectory.group.name,
        instance=rows[trajectory.instance],
        context=trajectory.context,
        generated=trajectory.generated,
        version=trajectory.group.version or 0,
        moves=trajectory.moves,
        attempt=trajectory.group.attempt,
    )
