"""Which queued trajectory goes to which instance now. The others wait in the server and can still go anywhere.

Whatever rule picks the instance, every route keeps these promises:

1. the target is alive, holds nothing that waits for KV memory, and has a sequence slot and ``context + headroom``
   tokens of KV memory left, counting in the routes before it;
2. the target's version (after any pull in progress) is at least the version of the trajectory's group;
3. a fresh group starts only on a version with room, and uses up one place; its other members then count as started;
4. the queue is served in order, and what cannot be placed does not stop what can;
5. the oldest started trajectory for which no instance has memory or a slot claims the eligible instance with the most
   free memory, which takes no younger work in this call: short work cannot starve a long trajectory.

The rules: ``waterfall`` takes the largest marginal gain for what is fresh and the fastest instance for what is started,
``least_loaded`` the fewest running, ``round_robin`` the instance that was not used for longest::

    routes = route(situation, strategies)
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import Protocol

import numpy as np

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.situation import Bools, Fleet, Floats, Queued, Route, Situation
from staleflow.coordinator.strategies import ROUTING, Strategies


def waterfall(situation: Situation, strategies: Strategies) -> list[Route]:
    """For a fresh group the largest ``speed * (T(n + 1, c + context) - T(n, c))`` wins; it is started only where the
    gain, at the speed of the cost model, is at least ``mu / step(1, context)``.

    What is started must not wait for that, and goes where a step will be shortest: with the largest gain, long contexts
    would all be sent to one instance, where they slow nobody but each other, and they are what steps wait for."""
    fleet = situation.fleet.copy()
    return _Filling(situation, fleet, strategies.headroom, _Gain(fleet, situation.cost, strategies.mu)).run()


def least_loaded(situation: Situation, strategies: Strategies) -> list[Route]:
    """The fewest running sequences win; among equals, the first row."""
    fleet = situation.fleet.copy()
    return _Filling(situation, fleet, strategies.headroom, _Fewest(fleet)).run()


def round_robin(situation: Situation, strategies: Strategies) -> list[Route]:
    """In turn, from row ``turn`` modulo the size of the fleet; an instance that is passed over keeps its turn."""
    fleet = situation.fleet.copy()
    return _Filling(situation, fleet, strategies.headroom, _Turns(len(fleet.names), situation.turn)).run()


def route(situation: Situation, strategies: Strategies) -> list[Route]:
    """The routes by the configured rule."""
    return ROUTING.load(strategies.routing)(situation, strategies, **strategies.routing_arguments)


class _Rule(Protocol):
    """How good each instance is for one more sequence; the highest score wins if it is at least ``least``."""

    def scores(self, context: int, fresh: bool) -> Floats:
        """For every row; the array is the caller's."""
        ...

    def score(self, row: int, context: int, fresh: bool) -> float: ...
    def least(self, context: int) -> float: ...
    def longest(self) -> Floats:
        """For every row, the longest context for which its score is enough."""
        ...

    def placed(self, row: int, context: int) -> None:
        """The row has one more sequence of ``context`` tokens."""
        ...


class _Gain:
    def __init__(self, fleet: Fleet, cost: CostModel, mu: float) -> None:
        self.fleet, self.cost, self.mu = fleet, cost, mu
        self.speed = fleet.speed
        self.now = cost.throughputs(fleet.running, fleet.context)
        self.more = fleet.running + 1.0
        self.step = cost.step_times(self.more, fleet.context)
        """With one more sequence, its own context not counted."""

    def scores(self, context: int, fresh: bool) -> Floats:
        gain = self.step + self.cost.per_context_token * context
        if fresh:
            np.divide(self.more, gain, out=gain)
            gain -= self.now
        else:
            np.reciprocal(gain, out=gain)
        gain *= self.speed
        return gain

    def score(self, row: int, context: int, fresh: bool) -> float:
        if fresh:
            return float(self.speed[row] * self._gain(row, context))
        return float(self.speed[row] / (self.step[row] + self.cost.per_context_token * context))

    def _gain(self, row: int, context: int) -> float:
        """At the speed of the cost model."""
        return self.more[row] / (self.step[row] + self.cost.per_context_token * context) - self.now[row]

    def least(self, context: int) -> float:
        return self.mu / self.cost.step(1, context)

    def longest(self) -> Floats:
        """With ``y`` the time that the context adds to a step, ``u = step(1, 0)`` and ``s`` the step without ``y``::

        (n + 1) / (s + y) - T >= mu / (u + y)   <=>   T y² <= b y + c,   b = n + 1 - mu - T (s + u),
                                                                        c = (n + 1) u - mu s - T s u
        """
        s, u, now = self.step, self.cost.step(1, 0), self.now
        b = self.more - self.mu - now * (s + u)
        c = self.more * u - self.mu * s - now * s * u
        roots = np.sqrt(np.maximum(0.0, b * b + 4 * now * c))
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.where(now > 0, (b + roots) / (2 * now), inf)
            return np.nan_to_num(y / self.cost.per_context_token, nan=inf, posinf=inf)

    def placed(self, row: int, context: int) -> None:
        self.now[row] += self._gain(row, context)
        self.more[row] += 1.0
        self.step[row] = self.cost.step(int(self.fleet.running[row]) + 1, int(self.fleet.context[row]))


class _Fewest:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def scores(self, context: int, fresh: bool) -> Floats:  # noqa: ARG002
        return -self.fleet.running.astype(np.float64)

    def score(self, row: int, context: int, fresh: bool) -> float:  # noqa: ARG002
        return -float(self.fleet.running[row])

    def least(self, context: int) -> float:  # noqa: ARG002
        return -inf

    def longest(self) -> Floats:
        return np.full(len(self.fleet.names), inf)

    def placed(self, row: int, context: int) -> None: ...


class _Turns:
    def __init__(self, size: int, turn: int) -> None:
        self.turns = -((np.arange(size, dtype=np.float64) - turn) % max(1, size))
        self.last = float(size)

    def scores(self, context: int, fresh: bool) -> Floats:  # noqa: ARG002
        return self.turns.copy()

    def score(self, row: int, context: int, fresh: bool) -> float:  # noqa: ARG002
        return float(self.turns[row])

    def least(self, context: int) -> float:  # noqa: ARG002
        return -inf

    def longest(self) -> Floats:
        return np.full(len(self.turns), inf)

    def placed(self, row: int, context: int) -> None:  # noqa: ARG002
        self.turns[row] = -self.last
        self.last += 1.0


class _Level:
    """Trajectories that the same instances may take: those started with one version, or the fresh ones."""

    __slots__ = ("end", "failed", "shut")

    def __init__(self, shut: Bools, end: int) -> None:
        self.shut = shut
        """Instances that may not take them, whatever their context."""
        self.end = end
        """Where they end in the queue."""
        self.failed: float = inf
        """From this context on none finds a place. A call only fills instances, so they need not be tried again."""


class _Filling:
    """One call: the fleet as it fills up, the room as it is used up, the routes so far."""

    def __init__(self, situation: Situation, fleet: Fleet, headroom: int, rule: _Rule) -> None:
        self.queue = situation.queue if fleet.names else []
        self.fleet, self.headroom, self.rule = fleet, headroom, rule
        self.room = dict(situation.room)
        self.reserved: dict[str, int] = {}
        """The version that this call starts a fresh group with."""
        self.closed = ~fleet.alive | (fleet.waiting > 0) | (fleet.running + fleet.waiting >= fleet.max_running)
        self.claimed = False
        self.levels: dict[int | None, _Level] = {}
        self.routes: list[Route] = []
        self._scored: tuple[_Level, int, tuple[Floats, float]] | None = None

    def run(self) -> list[Route]:
        at = 0
        while at < len(self.queue):
            item = self.queue[at]
            version = self.reserved.get(item.group) if item.version is None else item.version
            level = self._level(version)
            if item.context < level.failed and self._place(item, version, level):
                at += 1
            else:
                at = self._next(at, version, level)
        return self.routes

    def _level(self, version: int | None) -> _Level:
        level = self.levels.get(version)
        if level is None:
            if version is None:
                open_to_fresh = [held for held, room in self.room.items() if room > 0]
                shut, end = ~np.isin(self.fleet.version, open_to_fresh), len(self.queue)
            else:
                shut, end = self.fleet.version < version, bisect_right(self.queue, version, key=_level)
            level = self.levels[version] = _Level(shut | self.closed, end)
        return level

    def _place(self, item: Queued, version: int | None, level: _Level) -> bool:
        context = item.context
        scores, least = self._scores(level, context)
        row = int(scores.argmax())
        best = float(scores[row])
        if best == -inf:
            self._refuse(version, level, context)
            return False
        self.fleet.place(row, context, self.headroom)
        self.rule.placed(row, context)
        if self.fleet.running[row] >= self.fleet.max_running[row]:
            self._close(row)
        fits = not level.shut[row] and self.fleet.kv_free[row] >= context + self.headroom
        again = self.rule.score(row, context, level is self.levels.get(None)) if fits else -inf
        scores[row] = again if again >= least * self.fleet.speed[row] else -inf
        target = int(self.fleet.version[row])
        if version is None:
            self._start(item.group, target, level)
        self.routes.append(Route(item.trajectory, item.group, self.fleet.names[row], target))
        return True

    def _scores(self, level: _Level, context: int) -> tuple[Floats, float]:
        """For every row, -inf where it cannot go; and the least score that is enough.

        Kept for the next trajectory, because members of a group often have the same context.
        """
        if self._scored is not None and self._scored[0] is level and self._scored[1] == context:
            return self._scored[2]
        fresh = level is self.levels.get(None)
        scores = self.rule.scores(context, fresh)
        np.putmask(scores, level.shut, -inf)
        np.putmask(scores, self.fleet.kv_free < context + self.headroom, -inf)
        least = self.rule.least(context) if fresh else -inf
        if least > -inf:
            np.putmask(scores, scores < least * self.fleet.speed, -inf)  # worth it for an instance of that speed
        self._scored = level, context, (scores, least)
        return self._scored[2]

    def _refuse(self, version: int | None, level: _Level, context: int) -> None:
        if version is not None and not self.claimed:
            self._claim(version)
        longest = np.asarray(self.fleet.kv_free - self.headroom, dtype=np.float64)
        if version is None:
            longest = np.minimum(self.rule.longest(), longest)
        longest = longest[~level.shut]
        level.failed = min(context, max(0.0, float(longest.max(initial=-inf)) + 1))

    def _claim(self, version: int) -> None:
        eligible = np.flatnonzero(self.fleet.alive & (self.fleet.version >= version))
        if len(eligible):
            self.claimed = True
            self._close(int(eligible[self.fleet.kv_free[eligible].argmax()]))
            self._scored = None

    def _close(self, row: int) -> None:
        self.closed[row] = True
        for level in self.levels.values():
            level.shut[row] = True

    def _start(self, group: str, version: int, fresh: _Level) -> None:
        """Use one place. A group due by some deadline takes a place from every later one, and from an earlier one
        only if that had as many left: room is the fewest places left up to any deadline from the version's on."""
        self.reserved[group] = version
        left = self.room[version] - 1
        for held, room in self.room.items():
            self.room[held] = room - 1 if held >= version else min(room, left)
            if room > 0 and self.room[held] <= 0:
                fresh.shut |= self.fleet.version == held
                self._scored = None
        if fresh.shut.all():
            fresh.failed = 0

    def _next(self, at: int, version: int | None, level: _Level) -> int:
        """The next position in the queue worth trying, after the one at ``at`` found no place."""
        queue, failed = self.queue, level.failed
        if queue[at].version is None and version is not None:
            return at + 1  # a member of a group that this call started: fresh groups come after it
        if not failed:
            return level.end
        return next((later for later in range(at + 1, level.end) if queue[later].context < failed), level.end)


def _level(item: Queued) -> float:
    return item.level
