"""The instances as the control plane knows them: their latest reports, and the commands that these cannot show yet.

A state says which command it was taken after. Commands with a higher number are counted on top of it (the speculative
state), so a decision never forgets what was decided a moment ago, however late instances are heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.situation import COLUMNS, Fleet
from staleflow.runtime.ports import Heard, InstancePort
from staleflow.servers.lifecycle import Trajectory
from staleflow.types import Drop, Fence, PullWeights, Return, Submit, Work

ALL_S = 10.0
"""Contexts grow while nothing happens: after this time every row of the table is written again."""
MOST_ROWS = 512
"""Rows that reports leave for the next decision to write, and that are written again in one for their age. Beyond that
each report writes one: with thousands of instances a decision would otherwise be hardly anything else."""


@dataclass(slots=True)
class Issued:
    """The effect of a command that the instance's state may not show yet."""

    number: int
    running: int
    context: int


@dataclass(slots=True, eq=False)
class Member:
    """One instance of the fleet."""

    port: InstancePort
    term: int
    """Of the control plane."""
    incarnation: int = 0
    alive: bool = True
    leaving: bool = False
    """It gets no more work; what it has comes back."""
    number: int = 0
    """Commands given in this term."""
    pulling: int | None = None
    """The version that it has been told to pull."""
    issued: list[Issued] = field(default_factory=list[Issued])
    residents: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    """Trajectories sent there and not back yet."""
    touched: bool = True
    """Whether a command or a report has changed what its row should show."""
    lost_at: float = 0.0
    """When it was last declared dead."""
    lost: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """What it held when it was declared dead; to be dropped there if it comes back."""
    seen: int = -1
    """The version it has reported to hold; -1 before its first pull."""
    version: int = -1
    """The same as far as the ledger knows that version. Tokens it has not reported yet are no older."""
    max_running: int = 0

    @property
    def name(self) -> str:
        return self.port.name

    @classmethod
    def of(cls, port: InstancePort, term: int, heard: Heard, newest: int) -> Member:
        state = heard.state
        version = min(state.version, newest)
        return cls(port, term, heard.incarnation, seen=state.version, version=version, max_running=state.max_running)

    def submit(self, trajectories: Sequence[Trajectory], work: list[Work]) -> None:
        context = 0
        for each in trajectories:
            self.residents[each.name] = each
            context += each.context
        self.issued.append(Issued(self.number + 1, len(trajectories), context))
        self.port.send(Submit(self._next(), work))

    def interrupt(self, trajectories: Sequence[Trajectory]) -> None:
        self.issued.append(Issued(self.number + 1, -len(trajectories), -sum(each.context for each in trajectories)))
        self.port.send(Return(self._next(), [(each.name, each.epoch) for each in trajectories]))

    def abort(self, trajectories: Sequence[Trajectory]) -> None:
        for each in trajectories:
            self.residents.pop(each.name, None)
        self.forget([(each.name, each.epoch) for each in trajectories])

    def left(self, name: str, epoch: int) -> None:
        """A trajectory is not there any more; unless it was sent there again since."""
        if (trajectory := self.residents.get(name)) is not None and trajectory.epoch == epoch:
            del self.residents[name]

    def pull(self, version: int) -> None:
        self.pulling = version
        self.port.send(PullWeights(self._next(), version))

    def forget(self, names: Sequence[tuple[str, int]]) -> None:
        """Drop what it holds and nobody wants."""
        self.port.send(Drop(self._next(), list(names)))

    def revive(self, heard: Heard, newest: int) -> None:
        """It reports again. The same incarnation still holds what was taken from it."""
        if heard.incarnation == self.incarnation:
            if self.lost:
                self.forget(self.lost)
        else:
            self.incarnation, self.number = heard.incarnation, 0
            self.seen, self.version = heard.state.version, min(heard.state.version, newest)
        self.alive, self.touched, self.lost = True, True, []

    @property
    def open(self) -> bool:
        """Whether it takes work."""
        return self.alive and not self.leaving

    @property
    def has_place(self) -> bool:
        """Whether it could run one more."""
        return self.open and len(self.residents) < self.max_running

    @property
    def context(self) -> int:
        """Tokens that would be prefilled again elsewhere if it left now, as far as they are known."""
        return sum(each.context for each in self.residents.values())

    @property
    def holds(self) -> int:
        """The version of whatever it decodes next."""
        return self.version if self.pulling is None else self.pulling

    def write(self, row: int, table: Any, heard: Heard, cost: CostModel, headroom: int) -> int:
        """Put the instance, with every command counted in, into its row of the columns. How many it runs."""
        term, incarnation, number = heard.applied
        shown = number if (term, incarnation) == (self.term, self.incarnation) else 0
        if self.issued and self.issued[0].number <= shown:
            self.issued = [each for each in self.issued if each.number > shown]
        state = heard.state
        running, context = state.running, state.context
        free = state.kv_free - headroom * running
        for each in self.issued:
            running += each.running
            context += each.context
            free -= each.context + headroom * each.running
        table.version[row] = self.holds
        table.running[row] = running = max(0, running)
        table.waiting[row] = state.waiting
        table.context[row] = max(0, context)
        table.kv_free[row] = free
        table.max_running[row] = self.max_running = state.max_running
        table.alive[row] = self.open
        table.pulling[row] = self.pulling is not None
        if state.step is not None and state.step[2] > 0:
            sequences, tokens, seconds = state.step
            measured, known = cost.step(sequences, tokens) / seconds, table.speed[row]
            table.speed[row] = known + 0.5 * (measured - known)
        return running

    def _next(self) -> Fence:
        self.number += 1
        self.touched = True
        return Fence(self.term, self.incarnation, self.number)


class FleetTable:
    """All members as one table; a refresh writes only the rows that have changed, and a bounded number of them."""

    def __init__(self, members: Sequence[Member], cost: CostModel, headroom: int) -> None:
        self.members = list(members)
        self.rows = {member.name: row for row, member in enumerate(self.members)}
        self.fleet = fleet = Fleet.of([member.name for member in self.members])
        self._cells: Any = Fleet(fleet.names, *(getattr(fleet, name).data for name in COLUMNS))
        """The same memory, to write one cell at a time: several times faster than through numpy."""
        self._cost = cost
        self._headroom = headroom
        self._all_at = 0.0
        self._began: float | None = None
        """When all rows were first written."""
        self._again = 0
        """Rows looked at since then for their age, in turn."""
        self._fresh = bytearray(len(self.members))
        """Whether a row has been written since its last turn."""
        self._reported: deque[int] = deque()
        """Rows to be written because of a report."""
        self.places = [0] * len(self.members)
        """How many more each could run."""
        self.waiting = [0] * len(self.members)
        """How many wait for memory inside each."""

    @property
    def cost_error(self) -> float:
        """How far the cost model is off, on average over the instances, by their latest measured steps."""
        return float(np.abs(1 / self.fleet.speed - 1).mean()) if self.members else 0.0

    def reported(self, member: Member) -> None:
        """The instance has said something: its row is to be written before the next decision."""
        if not member.touched:
            member.touched = True
            self._reported.append(self.rows[member.name])
            if len(self._reported) > MOST_ROWS:
                self._write(self._reported.popleft())

    def refresh(self, now: float) -> Fleet:
        """Rows of members that something happened to; from time to time, all of them."""
        for row in self._old(now):
            self._write(row)
            self._fresh[row] = 0
        for row, member in enumerate(self.members):
            if member.touched:
                self._write(row)
        self._reported.clear()
        return self.fleet

    def _old(self, now: float) -> Iterable[int]:
        """Rows to be written again because contexts have grown: all at a time, or in turn where there are many."""
        size = len(self.members)
        if self._began is None or size <= MOST_ROWS:
            if now < self._all_at:
                return ()
            self._began, self._all_at = now, now + ALL_S
            return range(size)
        due = min(self._again + MOST_ROWS, int(size * (now - self._began) / ALL_S))
        turn = [each % size for each in range(self._again, due)]
        self._again = max(self._again, due)
        old = [row for row in turn if not self._fresh[row]]
        for row in turn:
            self._fresh[row] = 0
        return old

    def _write(self, row: int) -> None:
        member = self.members[row]
        heard = member.port.heard()
        running = member.write(row, self._cells, heard, self._cost, self._headroom)
        self.places[row] = max(0, member.max_running - running) if member.open else 0
        self.waiting[row] = heard.state.waiting
        self._fresh[row] = 1
        member.touched = False
