"""The state of a run as its journal says, and what became of every trajectory: the production ``Book``, replayed.

    replica = Replica(settings)                 # of the journal: batch_size, max_staleness, ...
    replica.follow(events, begin, end)          # from an ``EventReader``, with its positions before and after
    replica.book.ledger.view()                  # the steps as buffers, now
    replica.ended, replica.marks                # trajectories that ended, and what happened when: taken by the index
    Replica.restored(replica.to_state())        # the same, later

Nothing is decided here. Memory is that of what is live, and of a few counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import log2
from typing import Any, NamedTuple, cast

import msgspec

from staleflow.protocol import StalenessLedger
from staleflow.run.events import Timed
from staleflow.servers.book import Book, group_name, let_go
from staleflow.servers.journal import Event
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.state import restore, to_state
from staleflow.servers.trajectories import TrajectoryServer

SETTINGS = ("batch_size", "max_staleness", "redundancy", "group_size", "extra_members")
BINS_PER_DOUBLING = 2
"""Of histograms of lengths."""


class Ended(NamedTuple):
    """A trajectory that was trained on or given up. Times are seconds of training; None: it never came so far."""

    name: str
    group: str
    prompt: int
    state: str
    """``trained``, or ``dropped``."""
    step: int | None
    """That trained it."""
    reason: str
    """Why it was dropped."""
    reward: float | None
    tokens: int
    instance: str
    """The last one it ran on."""
    places: int
    """How often it was sent to an instance."""
    moves: int
    oldest: int | None
    """Version of its oldest token."""
    newest: int | None
    admitted: float
    began: float | None
    generated: float | None
    scored: float | None
    ended: float
    first: int
    """Its events are in the journal after this position,"""
    last: int
    """and up to this one."""


class Mark(NamedTuple):
    """Something to show on the timeline."""

    time: float
    lane: str
    """An instance; or ``trainer``, ``evaluator``, ``run``."""
    kind: str
    value: str = ""


class _Times(msgspec.Struct, array_like=True):
    admitted: float
    first: int
    began: float | None = None
    generated: float | None = None
    scored: float | None = None
    instance: str = ""


class Replica:
    def __init__(self, settings: dict[str, int]) -> None:
        self.settings = settings
        batch, bound, redundancy, size, extra = (settings[name] for name in SETTINGS)
        self.book = Book(StalenessLedger(batch, bound, redundancy), size, extra)
        self.book.on_aborted = self._aborted
        self.book.on_committed = self._committed
        self.now = 0.0
        self.ended: list[Ended] = []
        self.marks: list[Mark] = []
        self.wasted: dict[str, int] = {}
        """Tokens, by reason."""
        self.wasted_at: dict[int, dict[str, int]] = {}
        """The same by the version that was being trained when they were given up."""
        self.released: Counter[str] = Counter()
        """Groups, by reason."""
        self.offered: Counter[int] = Counter()
        """Responses that ended by themselves or were cut, by bin of length."""
        self.trained: Counter[int] = Counter()
        """Those that were trained on."""
        self.blocked_since: float | None = None
        self._times: dict[str, _Times] = {}
        self._evaluating: dict[int, float] = {}
        self._begin = self._end = 0
        self._see = {
            "admit": self._saw_admit,
            "route": self._saw_route,
            "generated": self._saw_generated,
            "score": self._saw_score,
            "ended": self._saw_ended,
            "release": self._saw_release,
            "consume": self._saw_consume,
            "rollback": lambda step: self._mark("trainer", "rollback", step),
            "interrupt": self._saw_interrupt,
            "pull": lambda name, version: self._mark(name, "pull", version),
            "join": lambda name, version: self._mark(name, "join", version),
            "lost": lambda name: self._mark(name, "lost"),
            "left": lambda name: self._mark(name, "left"),
            "counted": self._saw_counted,
            "scale": lambda *values: self._mark("run", "scale", " ".join(map(str, values))),
            "fault": lambda *values: self._mark("run", "fault", " ".join(map(str, values))),
            "evaluating": self._saw_evaluating,
            "evaluated": self._saw_evaluated,
        }

    def follow(self, events: Iterable[Timed], begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self.book.replay(self._seen(events))
        blocked = self.book.ledger.frontier == self.book.ledger.version and bool(self.book.ledger.blocking())
        self.blocked_since = (self.now if self.blocked_since is None else self.blocked_since) if blocked else None

    def _seen(self, events: Iterable[Timed]) -> Iterator[Event]:
        see = self._see
        for time, event in events:
            self.now = time
            if (look := see.get(event[0])) is not None:
                look(*event[1:])
            yield event

    # What is seen, before the book has applied it

    def _saw_admit(self, prompt: int, attempt: int, *_rest: object) -> None:
        name = group_name(prompt, attempt)
        for member in range(self.book.group_size + self.book.extra_members):
            self._times[f"{name}/{member}"] = _Times(self.now, self._begin)

    def _saw_route(self, name: str, instance: str, _epoch: int) -> None:
        if (times := self._times.get(name)) is not None:
            if times.began is None:
                times.began = self.now
            elif times.instance != instance:
                self._mark(instance, "moved here", f"{name} from {times.instance}")
            times.instance = instance

    def _saw_interrupt(self, name: str) -> None:
        if (each := self.book.trajectories.get(name)) is not None and each.instance:
            self._mark(each.instance, "interrupt", name)

    def _saw_generated(self, name: str, spans: Any) -> None:
        self.offered[length_bin(sum(count for _, count in spans))] += 1
        if (times := self._times.get(name)) is not None:
            times.generated = self.now

    def _saw_score(self, name: str, _reward: float) -> None:
        if (times := self._times.get(name)) is not None:
            times.scored = self.now

    def _saw_ended(self, name: str, _reward: float, _masked: bool) -> None:
        """An environment has ended an episode, with a reward."""
        if (each := self.book.trajectories.get(name)) is not None:
            self._saw_generated(name, each.spans)
            self._saw_score(name, 0.0)

    def _saw_release(self, _name: str, reason: str, _again: bool) -> None:
        self.released[reason] += 1

    def _saw_consume(self, _names: Any, aborted: Any) -> None:
        self._mark("trainer", "full", self.book.ledger.frontier)
        if aborted:
            self.released["redundant"] += len(aborted)

    def _saw_counted(self, table: str, what: str, why: str) -> None:
        if table == "restarts":
            self._mark("run", "restart", f"{what}: {why}")

    def _saw_evaluating(self, version: int) -> None:
        self._evaluating[version] = self.now

    def _saw_evaluated(self, version: int, accuracy: float, *_: Any) -> None:
        began = self._evaluating.pop(version, self.now)
        self._mark("evaluator", "evaluated", f"{version} {accuracy:.4g} {began:.3f}")

    def _mark(self, lane: str, kind: str, value: object = "") -> None:
        self.marks.append(Mark(self.now, lane, kind, str(value)))

    # What the book says

    def _committed(self, step: int, groups: list[Group]) -> None:
        self._mark("trainer", "commit", step)
        for group in groups:
            for each in group.members:
                if each.state == "consumed":
                    self.trained[length_bin(each.generated)] += 1
                    self._end_of(each, "trained", step, "")
        let_go(groups)

    def _aborted(self, each: Trajectory, reason: str) -> None:
        tokens, version = each.generated, self.book.ledger.version
        if tokens:
            self.wasted[reason] = self.wasted.get(reason, 0) + tokens
            here = self.wasted_at.setdefault(version, {})
            here[reason] = here.get(reason, 0) + tokens
        self._end_of(each, "dropped", None, reason)

    def _end_of(self, each: Trajectory, state: str, step: int | None, reason: str) -> None:
        times = self._times.pop(each.name, None) or _Times(self.now, self._begin)
        versions = [version for version, _ in each.spans if version >= 0]
        self.ended.append(
            Ended(
                each.name,
                each.group.name,
                each.group.prompt,
                state,
                step,
                reason,
                each.reward,
                each.generated,
                times.instance,
                each.epoch & 0xFFFFF,  # placements of each attempt of a run count from a number of their own
                each.moves,
                min(versions, default=None),
                max(versions, default=None),
                times.admitted,
                times.began,
                times.generated,
                times.scored,
                self.now,
                times.first,
                self._end,
            )
        )

    def live(self, name: str) -> _Times | None:
        return self._times.get(name)

    # To continue later

    def to_state(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "book": to_state(cast(TrajectoryServer, self.book)),
            "now": self.now,
            "blocked_since": self.blocked_since,
            "wasted": self.wasted,
            "wasted_at": self.wasted_at,
            "released": self.released,
            "offered": self.offered,
            "trained": self.trained,
            "times": self._times,
            "evaluating": self._evaluating,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Replica:
        replica = cls(state["settings"])
        restore(cast(TrajectoryServer, replica.book), state["book"])
        replica.now, replica.blocked_since = state["now"], state["blocked_since"]
        replica.wasted, replica.wasted_at = state["wasted"], state["wasted_at"]
        replica.released, replica.offered = Counter(state["released"]), Counter(state["offered"])
        replica.trained = Counter(state["trained"])
        replica._times = {name: _Times(*times) for name, times in state["times"].items()}
        replica._evaluating = state["evaluating"]
        return replica

    @classmethod
    def of_snapshot(cls, settings: dict[str, int], snapshot: dict[str, Any]) -> Replica:
        """Of a journal whose first events are a state that was restored, and not how it came about."""
        replica = cls(settings)
        restore(cast(TrajectoryServer, replica.book), snapshot)
        return replica


def length_bin(tokens: int) -> int:
    return int(BINS_PER_DOUBLING * log2(tokens)) if tokens > 0 else -1


def bin_edge(each: int) -> int:
    """The smallest length in a bin."""
    return 0 if each < 0 else round(2 ** (each / BINS_PER_DOUBLING))
