"""The staleness ledger: which groups are live, how old they may get, and whether a step may train.

A group of version ``V`` has the deadline ``V + max_staleness``: the last step that may train on it. The ledger grants
a place only while every live group can still be trained by its deadline (``schedule.py`` does the counting). So it
promises, whatever finishes when, fails or is filtered:

1. no group is trained more than ``max_staleness`` steps after its version;
2. a group is committed at most once, and a step trains exactly ``batch_size`` groups;
3. ``admitted = live + committed + released``;
4. once every group in flight has finished or was released, the open step can be filled;
5. with ``max_staleness = 0`` nothing is admitted between the start of a step and its commit.

The states of a group, and the calls that change them::

    reserve -> in flight -> occupy -> complete -> take / consume -> leased -> commit
                   |                     |  ^                          |
                   +------ release ------+  +-------- rollback --------+

The ledger is pure: it holds names and numbers, does no I/O and reads no clock. A call costs
O(max_staleness + log live) for each group that it hands over. Use::

    ledger = StalenessLedger(batch_size=128, max_staleness=2)
    if ledger.reserve("g7", version=ledger.version):  # before the group's first token
        ledger.occupy("g7")                           # every member finished and scored
    if ledger.ready():
        batch = ledger.consume()                      # train on batch.groups and publish the weights, then:
        ledger.commit(batch.step)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, get_args

from staleflow.errors import StaleFlowError
from staleflow.protocol.layout import lay_out
from staleflow.protocol.schedule import GroupState, LiveGroup, Schedule
from staleflow.types import Batch, LedgerCounts, StepView

REDUNDANT = "redundant"
"""The reason for which the ledger itself releases groups, only with redundancy."""


class LedgerError(StaleFlowError, ValueError):
    """The ledger was misused: the message names the group and the fix. The state is as it was before the call."""


class StalenessLedger:
    """See the module. ``redundancy`` is how many groups beyond ``batch_size`` are admitted for each step."""

    def __init__(self, batch_size: int, max_staleness: int, redundancy: int = 0) -> None:
        _check("batch_size", batch_size, 1)
        _check("max_staleness", max_staleness, 0)
        _check("redundancy", redundancy, 0)
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.redundancy = redundancy
        self.version = 0
        """Completed updates; the newest version that a group may be reserved with."""
        self._schedule = Schedule(batch_size, redundancy, horizon=max_staleness + 1)
        self._groups: dict[str, LiveGroup] = {}
        """All live groups; those that are not leased are in the schedule too."""
        self._leased: list[LiveGroup] = []
        self._order = 0
        self._moves = 0
        """How often a deadline was changed, since this was made."""
        self._committed = 0
        self._released: dict[str, int] = {}

    @property
    def frontier(self) -> int:
        """The next step not yet leased: ``version``, or ``version + 1`` while a full step awaits its commit."""
        return self._schedule.frontier

    @property
    def taken(self) -> int:
        """Groups leased to a step and not yet committed: ``batch_size`` when the step is full."""
        return len(self._leased)

    # Admission

    def reserve(self, group: str, version: int) -> bool:
        """Admit ``group``, whose oldest token will be of ``version``. False if a deadline could then be missed."""
        if group in self._groups:
            raise LedgerError(f"reserve: group {group!r} is live already; reserve it only once")
        deadline = self._deadline(version, group)
        if not self._room(deadline):
            return False
        self._order += 1
        self._groups[group] = entry = LiveGroup(group, deadline, self._order)
        self._schedule.add(entry)
        return True

    def can_reserve(self, version: int) -> bool:
        """Whether a group of ``version`` would be granted now."""
        return self.room(version) > 0

    def room(self, version: int) -> int:
        """How many more groups of ``version`` would be granted now."""
        return self._room(self._deadline(version))

    def lower(self, group: str, version: int) -> bool:
        """Let a member run on an older ``version``. False, and no change, if a deadline could then be missed."""
        entry = self._find(group, "lower", "in flight")
        deadline = self._deadline(version, group)
        if deadline >= entry.deadline:
            return True
        if deadline < self.frontier or not self._schedule.free(deadline, entry.deadline - 1):
            return False
        self._move(entry, deadline)
        return True

    def renew(self, group: str, version: int) -> None:
        """No token older than ``version`` is left in the group: its deadline moves later. Always granted."""
        entry = self._find(group, "renew", "in flight")
        deadline = self._deadline(version, group)
        if deadline < entry.deadline:
            was = entry.deadline - self.max_staleness
            raise LedgerError(f"renew: group {group!r} has version {was}; to go back to {version} call lower")
        self._move(entry, deadline)

    # Completion

    def occupy(self, group: str) -> None:
        """All members that are needed have finished and are scored: the group is complete."""
        entry = self._find(group, "occupy", "in flight")
        self._schedule.remove(entry)
        self._order += 1
        entry.order = self._order
        entry.state = "complete"
        self._schedule.add(entry)

    def release(self, group: str, reason: str) -> None:
        """The group will not be trained (aborted, filtered, failed). Its place is free at once."""
        entry = self._find(group, "release", "in flight", "complete")
        if not reason:
            raise LedgerError(f"release: group {group!r} needs a reason, such as 'filtered'")
        self._schedule.remove(entry)
        del self._groups[group]
        self._released[reason] = self._released.get(reason, 0) + 1

    # Consumption

    def take(self, limit: int | None = None) -> list[str]:
        """Lease to step ``frontier`` the complete groups that can go now, earliest deadline first, ``limit`` at most.

        Never gives a group up: where redundancy makes that necessary, the step's last place is left to ``consume``.
        """
        if limit is not None and limit < 0:
            raise LedgerError(f"take: the limit is {limit}; give 0 or more, or None for all that can go")
        if self._full:
            return []
        return self._lease(self._schedule.takeable(limit))

    def takeable(self) -> int:
        """How many groups ``take`` would lease now."""
        return 0 if self._full else self._schedule.takeable()

    def ready(self) -> bool:
        """Whether ``consume`` can take the rest of step ``frontier`` now."""
        return not self._full and not self._schedule.missing() and not self._schedule.blocked()

    def consume(self, rank: Callable[[str], float] | None = None) -> Batch:
        """Take the rest of step ``frontier``, and give up the fewest surplus groups that redundancy admitted.

        Groups in flight are given up first, lowest ``rank(group)`` first (tokens generated, say), among equals the
        latest reserved; then complete groups for which no step has a place.
        """
        if not self.ready():
            raise LedgerError(self._why_not_ready())
        step = self.frontier
        aborted = _names(self._schedule.surplus(rank or (lambda _: 0)))
        for group in aborted:
            self.release(group, REDUNDANT)
        self._lease(self.batch_size - self.taken)
        in_order = sorted(self._leased, key=lambda entry: (entry.deadline, entry.order))
        return Batch(step, _names(in_order), aborted)

    def commit(self, step: int) -> None:
        """The version that ``step`` made is durable: its groups are gone for good."""
        if step != self.version or not self._full:
            held = f"step {self.version} has {self.taken} of {self.batch_size} groups"
            raise LedgerError(f"commit: step {step} is not a full step ({held}); consume it first")
        for entry in self._leased:
            del self._groups[entry.name]
        self._committed += self.taken
        self._leased = []
        self.version += 1

    def rollback(self, step: int) -> None:
        """The trainer died before the commit of ``step``, full or partly taken: its groups are complete again."""
        if step != self.version or not self._leased:
            held = f"step {self.version} has {self.taken}"
            raise LedgerError(f"rollback: step {step} has no leased groups ({held}); there is nothing to undo")
        self._schedule.unlease(step, self._leased)
        self._leased = []

    # For people and for storage

    def blocking(self) -> list[str]:
        """The groups in flight that step ``frontier`` waits for, oldest first; empty if it only lacks completions."""
        due = self._schedule.in_flight[: self._schedule.blocked()]
        return _names(sorted(chain.from_iterable(due), key=_by_order))

    def blocked(self) -> tuple[int, object]:
        """How many groups ``blocking`` would name, and a mark: while it stays the same, none has joined them, and none
        has left them that could come back."""
        schedule, due = self._schedule, self._schedule.blocked()
        mark = schedule.frontier, due, sum(schedule.joined[:due]), self._moves
        return sum(map(len, schedule.in_flight[:due])), mark

    def view(self) -> list[StepView]:
        """The paper's buffers: every live group laid out into the steps from ``frontier`` on."""
        return lay_out(
            first_step=self.frontier,
            batch_size=self.batch_size,
            places=self._schedule.places,
            taken=[] if self._full else _names(self._leased),
            in_flight=[_names(sorted(due, key=_by_order)) for due in self._schedule.in_flight],
            complete=[_names(due.values()) for due in self._schedule.complete],
        )

    def counts(self) -> LedgerCounts:
        """How many groups were admitted, and what became of them."""
        return LedgerCounts(
            admitted=len(self._groups) + self._committed + sum(self._released.values()),
            live=len(self._groups),
            complete=sum(map(len, self._schedule.complete)),
            leased=self.taken,
            committed=self._committed,
            released=dict(self._released),
        )

    def to_state(self) -> dict[str, Any]:
        """Everything, as plain JSON-able data for ``from_state``."""
        entries = sorted(self._groups.values(), key=_by_order)
        return {
            "batch_size": self.batch_size,
            "max_staleness": self.max_staleness,
            "redundancy": self.redundancy,
            "version": self.version,
            "groups": [[entry.name, entry.deadline - self.max_staleness, entry.state] for entry in entries],
            "committed": self._committed,
            "released": dict(self._released),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StalenessLedger:
        """The ledger that ``to_state`` described. Refuses data that cannot describe a ledger."""
        try:
            ledger = cls(state["batch_size"], state["max_staleness"], state["redundancy"])
            ledger._load(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(f"not the state of a ledger ({error}); restore an earlier one") from error
        return ledger

    def _load(self, state: Mapping[str, Any]) -> None:
        self.version = _check("version", state["version"], 0)
        self._committed = _check("committed", state["committed"], 0)
        self._released = {reason: _check(reason, count, 1) for reason, count in state["released"].items()}
        for name, version, held in state["groups"]:
            if name in self._groups or held not in get_args(GroupState):
                raise LedgerError(f"group {name!r} is listed twice, or its state {held!r} is unknown")
            self._order += 1
            self._groups[name] = LiveGroup(name, self._deadline(version, name), self._order, held)
        self._leased = [entry for entry in self._groups.values() if entry.state == "leased"]
        self._schedule.resume(self.version, self.taken)
        for entry in self._groups.values():
            if entry.deadline < (self.version if entry.state == "leased" else self.frontier):
                raise LedgerError(f"group {entry.name!r} is past its deadline")
            if entry.state != "leased":
                self._schedule.add(entry)
        if self.taken > self.batch_size or self._schedule.free(self.frontier) < 0:
            raise LedgerError("there are more groups than places")

    # Within

    @property
    def _full(self) -> bool:
        return self._schedule.frontier > self.version

    def _deadline(self, version: object, group: str | None = None) -> int:
        if not isinstance(version, int) or not 0 <= version <= self.version:
            whose = "" if group is None else f" of group {group!r}"
            raise LedgerError(
                f"version {version!r}{whose} does not exist; give one of those made so far, 0..{self.version}"
            )
        return version + self.max_staleness

    def _room(self, deadline: int) -> int:
        return self._schedule.free(deadline) if deadline >= self._schedule.frontier else 0

    def _find(self, group: str, call: str, *states: GroupState) -> LiveGroup:
        entry = self._groups.get(group)
        if entry is None:
            raise LedgerError(f"{call}: group {group!r} is not live; reserve it first")
        if entry.state not in states:
            fix = "roll its step back first" if entry.state == "leased" else f"{call} is for groups in flight"
            raise LedgerError(f"{call}: group {group!r} is {entry.state}; {fix}")
        return entry

    def _move(self, entry: LiveGroup, deadline: int) -> None:
        self._schedule.remove(entry)
        entry.deadline = deadline
        self._schedule.add(entry)
        self._moves += 1

    def _lease(self, count: int) -> list[str]:
        entries = self._schedule.lease(count)
        self._leased += entries
        return _names(entries)

    def _why_not_ready(self) -> str:
        step = self.frontier
        if self._full:
            return f"consume: step {self.version} is full; commit it or roll it back before step {step}"
        if waiting := self.blocking():
            return f"consume: step {step} waits for {', '.join(map(repr, waiting[:8]))}; occupy or release them"
        return f"consume: step {step} lacks {self._schedule.missing()} complete groups; call it when ready() is true"


def _check(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LedgerError(f"{name} is {value!r}; give a whole number, {least} or more")
    return value


def _by_order(entry: LiveGroup) -> int:
    return entry.order


def _names(entries: Iterable[LiveGroup]) -> list[str]:
    return [entry.name for entry in entries]
