"""Which queued trajectory goes to which instance now. The others wait in the server and can still go anywhere.

Whatever rule picks the instance, every route keeps these promises:

1. the target is alive, holds nothing that waits for KV memory, and has a sequence slot and ``context + headroom``
   tokens of KV memory left, counting in the routes before it;
2. the target's version (after any pull in progress) is at least the version of the trajectory's group;
3. a fresh group starts only on a version with room, and uses up one place; its other members then count as reserved;
4. the queue is served in order, and what cannot be placed does not stop what can;
5. the oldest reserved trajectory for which no instance has memory or a slot claims the eligible instance with the most
   free memory, which takes no younger work in this call: short work cannot starve a long trajectory;
6. there are no more than ``most_routes`` in one call.

Where environments play, memory is kept for contexts that will come back to an instance that is at work: a fresh group
does not take it. ``waterfall`` also counts the prefill that a turn saves where its last one was; the price is spread
over the tokens of a turn, so an instance that is fuller than others loses its own episodes to them.

The rules: ``waterfall`` takes the largest marginal gain for what is fresh and the fastest instance for what is
reserved, ``least_loaded`` the fewest running, ``round_robin`` the instance that was not used for longest.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.crowding import least_gain
from staleflow.coordinator.situation import Fleet, Floats, Queued, Route, Situation
from staleflow.coordinator.strategies import Strategies

MOST_ROUTES = 1024
"""Routes of one call: with thousands of instances each costs ten microseconds and more, and the next call continues."""
MOST_LOOKS = 1 << 21
"""Routes of one call times the instances that each may look at: with more than 2,048 of them there are fewer routes."""
FEW = 16
"""Up to here Python's own loop over the instances is faster than calling numpy."""


def most_routes(instances: int) -> int:
    """How many trajectories one call places at most."""
    return min(MOST_ROUTES, max(1, MOST_LOOKS // max(1, instances)))


def waterfall(situation: Situation, strategies: Strategies) -> list[Route]:
    """For a fresh group the largest ``speed * (T(n + 1, c + context) - T(n, c))`` wins; it is started only where the
    gain, at the speed of the cost model, is at least ``mu / step(1, context)``.

    What is reserved must not wait for that, and goes where a step will be shortest: with the largest gain, long
    contexts would all be sent to one instance, where they slow only each other, and they are what steps wait for."""
    rows = _Rows(situation.fleet)
    return _Filling(
        situation, rows, strategies.headroom, _Gain(rows, situation.cost, least_gain(situation, strategies))
    ).run()


def least_loaded(situation: Situation, strategies: Strategies) -> list[Route]:
    """The fewest running sequences win; among equals, the first row."""
    rows = _Rows(situation.fleet)
    return _Filling(situation, rows, strategies.headroom, _Fewest(rows)).run()


def round_robin(situation: Situation, strategies: Strategies) -> list[Route]:
    """In turn, from row ``turn`` modulo the size of the fleet; an instance that is passed over keeps its turn."""
    rows = _Rows(situation.fleet)
    return _Filling(situation, rows, strategies.headroom, _Turns(rows, situation.turn)).run()


class _Rule(Protocol):
    """How good each instance is for one more sequence; the highest score wins if it is at least ``least``."""

    def scores(self, context: int, fresh: bool) -> Floats:
        """The score of each row, as an array that the caller may change."""
        ...

    def score(self, row: int, context: int, fresh: bool) -> float: ...
    def least(self, context: int) -> float: ...
    def longest(self) -> Floats:
        """For each row: the longest context for which its score is enough."""
        ...

    def placed(self, row: int, context: int) -> None:
        """The row has one more sequence of ``context`` tokens."""
        ...


class _Rows:
    """The fleet as it fills up, to be looked at in two ways on the same memory: all rows at once (numpy), and one row
    at a time as Python's own numbers. Where there are few rows, only the second is used and is a list."""

    def __init__(self, fleet: Fleet) -> None:
        self.few = len(fleet.names) <= FEW
        self.fleet = fleet = fleet if self.few else fleet.copy()
        self.running, self.context, self.kv_free = map(self.column, (fleet.running, fleet.context, fleet.kv_free))
        self.max_running, self.version, self.speed = map(self.column, (fleet.max_running, fleet.version, fleet.speed))

    def column(self, values: NDArray[Any]) -> Any:
        return values.tolist() if self.few else values.data

    def closed(self) -> Any:
        """The rows that take nothing, whatever it is."""
        fleet = self.fleet
        if not self.few:
            return ~fleet.alive | (fleet.waiting > 0) | (fleet.running + fleet.waiting >= fleet.max_running)
        each = zip(fleet.alive.tolist(), fleet.waiting.tolist(), self.running, self.max_running, strict=True)
        return [not alive or waiting > 0 or running >= most for alive, waiting, running, most in each]


class _Gain:
    def __init__(self, rows: _Rows, cost: CostModel, mu: float) -> None:
        fleet = rows.fleet
        self.cost, self.mu, self.rows = cost, mu, rows
        if rows.few:
            each = list(zip(rows.running, rows.context, strict=True))
            self.now = [cost.throughput(running, context) for running, context in each]
            self.more = [running + 1.0 for running in rows.running]
            self.step = [cost.step(running + 1, context) for running, context in each]
            return
        self.nows = cost.throughputs(fleet.running, fleet.context)
        self.mores = fleet.running + 1.0
        self.steps = cost.step_times(self.mores, fleet.context)
        """With one more sequence, its own context not counted."""
        self.now, self.more, self.step = map(rows.column, (self.nows, self.mores, self.steps))

    def scores(self, context: int, fresh: bool) -> Floats:
        gain = self.steps + self.cost.per_context_token * context
        if not fresh:
            return np.divide(self.rows.fleet.speed, gain, out=gain)
        np.divide(self.mores, gain, out=gain)
        gain -= self.nows
        gain *= self.rows.fleet.speed
        return gain

    def score(self, row: int, context: int, fresh: bool) -> float:
        speed, seconds = self.rows.speed[row], self.step[row] + self.cost.per_context_token * context
        return speed * (self.more[row] / seconds - self.now[row]) if fresh else speed / seconds

    def least(self, context: int) -> float:
        return self.mu / self.cost.step(1, context)

    def longest(self) -> Floats:
        """With ``y`` the time that the context adds to a step, ``u = step(1, 0)`` and ``s`` the step without ``y``::

        (n + 1) / (s + y) - T >= mu / (u + y)   <=>   T y² <= b y + c,   b = n + 1 - mu - T (s + u),
                                                                        c = (n + 1) u - mu s - T s u
        """
        s, u, now = self.steps, self.cost.step(1, 0), self.nows
        b = self.mores - self.mu - now * (s + u)
        c = self.mores * u - self.mu * s - now * s * u
        roots = np.sqrt(np.maximum(0.0, b * b + 4 * now * c))
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.where(now > 0, (b + roots) / (2 * now), inf)
            return np.nan_to_num(y / self.cost.per_context_token, nan=inf, posinf=inf)

    def placed(self, row: int, context: int) -> None:
        now = self.now[row]
        self.now[row] = now + (self.more[row] / (self.step[row] + self.cost.per_context_token * context) - now)
        self.more[row] += 1.0
        self.step[row] = self.cost.step(self.rows.running[row] + 1, self.rows.context[row])


class _Fewest:
    def __init__(self, rows: _Rows) -> None:
        self.rows = rows

    def scores(self, context: int, fresh: bool) -> Floats:  # noqa: ARG002
        return -self.rows.fleet.running.astype(np.float64)

    def score(self, row: int, context: int, fresh: bool) -> float:  # noqa: ARG002
        return -float(self.rows.running[row])

    def least(self, context: int) -> float:  # noqa: ARG002
        return -inf

    def longest(self) -> Floats:
        return np.full(len(self.rows.fleet.names), inf)

    def placed(self, row: int, context: int) -> None: ...


class _Turns:
    def __init__(self, rows: _Rows, turn: int) -> None:
        size = len(rows.fleet.names)
        self.turns = -((np.arange(size, dtype=np.float64) - turn) % max(1, size))
        self.turn = rows.column(self.turns)
        self.last = float(size)

    def scores(self, context: int, fresh: bool) -> Floats:  # noqa: ARG002
        return self.turns.copy()

    def score(self, row: int, context: int, fresh: bool) -> float:  # noqa: ARG002
        return self.turn[row]

    def least(self, context: int) -> float:  # noqa: ARG002
        return -inf

    def longest(self) -> Floats:
        return np.full(len(self.turns), inf)

    def placed(self, row: int, context: int) -> None:  # noqa: ARG002
        self.turn[row] = -self.last
        self.last += 1.0


class _Level:
    """Trajectories that the same instances may take: those reserved with one version, or the fresh ones."""

    __slots__ = ("closed", "end", "failed", "shut")

    def __init__(self, shut: Any, end: int) -> None:
        self.shut = shut
        """Instances that may not take them, whatever their context; a list where there are few."""
        self.closed: Any = shut if type(shut) is list else shut.data
        """The same memory, for one instance."""
        self.end = end
        """Where they end in the queue."""
        self.failed: float = inf
        """From this context on none finds a place. A call only fills instances, so they need not be tried again."""


class _Filling:
    """One call: the fleet as it fills up, the room as it is used up, the routes so far."""

    def __init__(self, situation: Situation, rows: _Rows, headroom: int, rule: _Rule) -> None:
        self.fleet = fleet = rows.fleet
        self.queue = situation.queue if fleet.names else []
        self.rows, self.headroom, self.rule = rows, headroom, rule
        self.room = dict(situation.room)
        self.prefill_s = situation.cost.per_prefill_token / max(1.0, situation.turn_tokens)
        """Of a token, for each token of a turn."""
        kept = situation.returning
        self.kept = [kept.get(name, 0) for name in fleet.names] if kept else []
        """Memory that fresh groups leave free, by row."""
        self.row_of: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        """The version that this call reserves a fresh group with."""
        self.closed = rows.closed()
        self.claimed = False
        self.levels: dict[int | None, _Level] = {}
        self.routes: list[Route] = []
        self._scored: tuple[_Level, int, tuple[list[float] | Floats, float]] | None = None

    def run(self) -> list[Route]:
        at, most = 0, most_routes(len(self.fleet.names))
        while at < len(self.queue) and len(self.routes) < most:
            item = self.queue[at]
            version = self.reserved.get(item.group) if item.version is None else item.version
            level = self.levels.get(version) or self._level(version)
            if item.context < level.failed and self._place(item, version, level):
                at += 1
            else:
                at = self._next(at, version, level)
        return self.routes

    def _level(self, version: int | None) -> _Level:
        if version is None:
            shut, end = self.closed.copy(), len(self.queue)
            for held in set(self.rows.version):
                if self.room.get(held, 0) <= 0:
                    self._shut(shut, held)
        else:
            end = bisect_right(self.queue, version, key=lambda item: item.level)
            if self.rows.few:
                each = zip(self.closed, self.rows.version, strict=True)
                shut = [closed or held < version for closed, held in each]
            else:
                shut = self.closed | (self.fleet.version < version)
        level = self.levels[version] = _Level(shut, end)
        return level

    def _shut(self, shut: Any, version: int) -> None:
        """The instances that hold this version."""
        if self.rows.few:
            for row, held in enumerate(self.rows.version):
                if held == version:
                    shut[row] = True
        else:
            shut |= self.fleet.version == version

    def _place(self, item: Queued, version: int | None, level: _Level) -> bool:
        context, fresh = item.context, version is None
        scores, least = self._scores(level, context, fresh)
        row = scores.index(max(scores)) if isinstance(scores, list) else int(scores.argmax())
        if scores[row] == -inf:
            self._refuse(version, level, context)
            return False
        if item.cached and not fresh:
            row = self._home(item, scores, row)
        rows = self.rows
        rows.running[row] += 1
        rows.context[row] += context
        rows.kv_free[row] -= context + self.headroom
        self.rule.placed(row, context)
        if rows.running[row] >= rows.max_running[row]:
            self._close(row)
        scores[row] = self._score(row, context, level, least, fresh)
        target = rows.version[row]
        if fresh:
            self._reserve(item.group, target, level)
        self.routes.append(Route(item.trajectory, item.group, self.fleet.names[row], target))
        return True

    def _home(self, item: Queued, scores: list[float] | Floats, best: int) -> int:
        """Where its last turn was, if a step there, with the prefill that it saves, is no longer than on the best."""
        if not self.row_of:
            self.row_of = {name: row for row, name in enumerate(self.fleet.names)}
        home = self.row_of.get(item.home, best)
        if home == best or scores[home] == -inf or not isinstance(self.rule, _Gain):
            return best
        speed = self.rows.speed
        saved = self.prefill_s * item.cached / speed[home]
        return home if 1 / scores[home] - saved <= 1 / scores[best] else best

    def _score(self, row: int, context: int, level: _Level, least: float, fresh: bool) -> float:
        """-inf where it cannot go, or where it is not worth it for an instance of that speed."""
        if level.closed[row] or self.rows.kv_free[row] - self._kept(row, fresh) < context + self.headroom:
            return -inf
        score = self.rule.score(row, context, fresh)
        return score if score >= least * self.rows.speed[row] else -inf

    def _kept(self, row: int, fresh: bool) -> int:
        return self.kept[row] if fresh and self.kept and self.rows.running[row] else 0

    def _scores(self, level: _Level, context: int, fresh: bool) -> tuple[list[float] | Floats, float]:
        """The score of each row, and the least that is enough.

        Kept for the next trajectory, because members of a group often have the same context.
        """
        if self._scored is not None and self._scored[0] is level and self._scored[1] == context:
            return self._scored[2]
        least = self.rule.least(context) if fresh else -inf
        if self.rows.few:
            scores = [self._score(row, context, level, least, fresh) for row in range(len(self.fleet.names))]
        else:
            scores = self.rule.scores(context, fresh)
            np.putmask(scores, level.shut, -inf)
            free = self.fleet.kv_free
            if fresh and self.kept:
                free = free - np.where(self.fleet.running > 0, self.kept, 0)
            np.putmask(scores, free < context + self.headroom, -inf)
            if least > -inf:
                np.putmask(scores, scores < least * self.fleet.speed, -inf)
        self._scored = level, context, (scores, least)
        return self._scored[2]

    def _refuse(self, version: int | None, level: _Level, context: int) -> None:
        if version is not None and not self.claimed:
            self._claim(version)
        if self.rows.few:
            longest = (
                max(
                    (free for free, shut in zip(self.rows.kv_free, level.closed, strict=True) if not shut), default=-inf
                )
                - self.headroom
            )
        else:
            memory = np.asarray(self.fleet.kv_free - self.headroom, dtype=np.float64)
            possible = memory if version is not None else np.minimum(self.rule.longest(), memory)
            longest = float(possible[~level.shut].max(initial=-inf))
        level.failed = min(context, max(0.0, longest + 1))

    def _claim(self, version: int) -> None:
        eligible = np.flatnonzero(self.fleet.alive & (self.fleet.version >= version)).tolist()
        if eligible:
            self.claimed = True
            self._close(max(eligible, key=self.rows.kv_free.__getitem__))
            self._scored = None

    def _close(self, row: int) -> None:
        self.closed[row] = True
        for level in self.levels.values():
            level.shut[row] = True

    def _reserve(self, group: str, version: int, fresh: _Level) -> None:
        """Use one place. A group due by some deadline takes a place from every later one, and from an earlier one
        only if that had as many left: room is the fewest places left up to any deadline from the version's on."""
        self.reserved[group] = version
        left = self.room[version] - 1
        for held, room in self.room.items():
            self.room[held] = room - 1 if held >= version else min(room, left)
            if room > 0 and self.room[held] <= 0:
                self._shut(fresh.shut, held)
                self._scored = None

    def _next(self, at: int, version: int | None, level: _Level) -> int:
        """The next position in the queue worth trying, after the one at ``at`` found no place."""
        queue, failed = self.queue, level.failed
        if queue[at].version is None and version is not None:
            return at + 1  # a member of a group that this call reserved: fresh groups come after it
        if not failed:
            return level.end
        return next((later for later in range(at + 1, level.end) if queue[later].context < failed), level.end)
