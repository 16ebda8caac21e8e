"""The instances as the control plane knows them: the latest snapshot of each, and the commands it cannot show yet.

A snapshot says which command it was taken after. Commands with a higher number are counted on top of it (the
speculative state), so a decision never forgets what was decided a moment ago, however late snapshots are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.situation import Fleet, InstanceView
from staleflow.runtime.ports import Fence, InstancePort, Snapshot, Work
from staleflow.servers.lifecycle import Trajectory

ALL_S = 10.0
"""Contexts grow while nothing happens: after this time every row of the table is written again."""


@dataclass(slots=True)
class Issued:
    """The effect of a command that a snapshot may not show yet."""

    number: int
    running: int
    context: int


@dataclass(slots=True, eq=False)
class Member:
    """One instance of the fleet."""

    port: InstancePort
    term: int
    """The life of the control plane."""
    life: int = 0
    """The life of the instance."""
    alive: bool = True
    number: int = 0
    """Commands given in this term."""
    pulling: int | None = None
    """The version that it has been told to pull."""
    issued: list[Issued] = field(default_factory=list[Issued])
    residents: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    """Trajectories sent there and not back yet."""
    touched: bool = True
    """Whether a command or a report has changed what its row should show."""
    lost: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """What it held when it was taken for dead; to be dropped there should it come back."""
    seen: int = -1
    """The version it has reported to hold; -1 before its first pull."""
    version: int = -1
    """The same as far as the ledger knows that version. Tokens it has not reported yet are no older."""

    @property
    def name(self) -> str:
        return self.port.name

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        work = [
            Work(each.name, each.epoch, each.group.name, each.group.prompt_tokens, each.spans) for each in trajectories
        ]
        self.issued.append(Issued(self.number + 1, len(work), sum(each.context for each in trajectories)))
        self.residents.update((each.name, each) for each in trajectories)
        self.port.submit(self._next(), work)

    def interrupt(self, trajectories: Sequence[Trajectory]) -> None:
        self.issued.append(Issued(self.number + 1, -len(trajectories), -sum(each.context for each in trajectories)))
        self.port.interrupt(self._next(), [(each.name, each.epoch) for each in trajectories])

    def abort(self, trajectories: Sequence[Trajectory]) -> None:
        for each in trajectories:
            self.residents.pop(each.name, None)
        self.port.abort(self._next(), [(each.name, each.epoch) for each in trajectories])

    def pull(self, version: int) -> None:
        self.pulling = version
        self.port.pull(self._next(), version)

    def forget(self, names: Sequence[tuple[str, int]]) -> None:
        """Drop what it holds and nobody wants."""
        self.port.abort(self._next(), names)

    def revive(self, snapshot: Snapshot, newest: int) -> None:
        """It is heard of again. In the same life it still holds what was taken from it."""
        if snapshot.life == self.life:
            if self.lost:
                self.forget(self.lost)
        else:
            self.life, self.number = snapshot.life, 0
            self.seen, self.version = snapshot.version, min(snapshot.version, newest)
        self.alive, self.touched, self.lost = True, True, []

    @property
    def has_place(self) -> bool:
        """Whether it could run one more."""
        return self.alive and len(self.residents) < self.port.snapshot().max_running

    @property
    def holds(self) -> int:
        """The version of whatever it decodes next."""
        return self.version if self.pulling is None else self.pulling

    def write(self, row: int, table: Fleet, snapshot: Snapshot, cost: CostModel, headroom: int) -> None:
        """Put the instance, with every command counted in, into its row of the table."""
        current = (snapshot.applied.term, snapshot.applied.life) == (self.term, self.life)
        shown = snapshot.applied.number if current else 0
        if self.issued and self.issued[0].number <= shown:
            self.issued = [each for each in self.issued if each.number > shown]
        running, context = snapshot.running, snapshot.context
        free = snapshot.kv_free - headroom * snapshot.running
        for each in self.issued:
            running += each.running
            context += each.context
            free -= each.context + headroom * each.running
        table.version[row] = self.holds
        table.running[row] = max(0, running)
        table.waiting[row] = snapshot.waiting
        table.context[row] = max(0, context)
        table.kv_free[row] = free
        table.max_running[row] = snapshot.max_running
        table.alive[row] = self.alive
        table.pulling[row] = self.pulling is not None
        if snapshot.step is not None and snapshot.step[2] > 0:
            sequences, tokens, seconds = snapshot.step
            measured = cost.step(sequences, tokens) / seconds
            table.speed[row] += 0.5 * (measured - table.speed[row])

    def _next(self) -> Fence:
        self.number += 1
        self.touched = True
        return Fence(self.term, self.life, self.number)


class FleetTable:
    """All members as one table; a refresh writes only the rows that have changed."""

    def __init__(self, members: Sequence[Member], cost: CostModel, headroom: int) -> None:
        self.members = list(members)
        self.rows = {member.name: row for row, member in enumerate(self.members)}
        self.fleet = Fleet.of([InstanceView(member.name, version=-1) for member in self.members])
        self._cost = cost
        self._headroom = headroom
        self._all_at = 0.0

    @property
    def cost_error(self) -> float:
        """How far the cost model is off, on average over the instances, by their latest measured steps."""
        return float(np.abs(1 / self.fleet.speed - 1).mean()) if self.members else 0.0

    def refresh(self, now: float) -> Fleet:
        """Rows of members that something happened to; from time to time, all of them."""
        everyone = now >= self._all_at
        if everyone:
            self._all_at = now + ALL_S
        for row, member in enumerate(self.members):
            if everyone or member.touched:
                member.write(row, self.fleet, member.port.snapshot(), self._cost, self._headroom)
                member.touched = False
        return self.fleet
