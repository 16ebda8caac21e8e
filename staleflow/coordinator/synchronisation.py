"""Which instances pull the newest version now.

An instance pulls only if it is alive, is not pulling already and holds an older version. In every mode, one that has
nothing running and nothing in the queue that its version may take pulls: otherwise a run in which the ledger has room
only for newer versions would stop with an idle fleet. Beyond that:

``greedy``  all of them pull;
``starved`` no other pulls;
``gain``    those pull that are then predicted to generate more tokens within a horizon ``H``::

    stay = T(n, c) * H
    pull = max(0, H - pull_s - per_prefill_token * c) * T(n + m, c + m * x)

with ``n`` running, ``c`` context tokens, and ``m`` the instance's share of the queued work (mean context ``x``) that
the newest version may take and its own may not, at most what it would be routed. All instances are decided on before
any work is routed, so that the work spreads over all that pull.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf

import numpy as np

from staleflow.coordinator.crowding import least_gain
from staleflow.coordinator.situation import Bools, Floats, Ints, Pull, Situation
from staleflow.coordinator.strategies import Strategies

PULLS_IN_HORIZON = 4.0
"""The horizon in pulls while the time between two versions is unknown."""


def greedy(situation: Situation, strategies: Strategies) -> list[Pull]:  # noqa: ARG001
    if min(situation.fleet.version.tolist(), default=0) >= situation.newest:
        return []  # as nearly always
    return _pulls(situation, _behind(situation))


def starved(situation: Situation, strategies: Strategies) -> list[Pull]:  # noqa: ARG001
    return _pulls(situation, _behind(situation) & _starving(situation))


def gain(situation: Situation, strategies: Strategies) -> list[Pull]:
    behind = _behind(situation)
    chosen = behind & _starving(situation)
    chosen[_gaining(situation, strategies, np.flatnonzero(behind))] = True
    return _pulls(situation, chosen)


def _pulls(situation: Situation, chosen: Bools) -> list[Pull]:
    return [Pull(situation.fleet.names[row], situation.newest) for row in np.flatnonzero(chosen)]


def _behind(situation: Situation) -> Bools:
    fleet = situation.fleet
    return fleet.alive & ~fleet.pulling & (fleet.version < situation.newest)


def _starving(situation: Situation) -> Bools:
    """Nothing running, nothing waiting inside, and nothing in the queue that the instance's version may take."""
    fleet, queue = situation.fleet, situation.queue
    oldest = queue[0].level if queue else inf
    has_fresh = bool(queue) and queue[-1].version is None
    takes_fresh = [version for version, room in situation.room.items() if has_fresh and room > 0]
    fed = (fleet.version >= oldest) | np.isin(fleet.version, takes_fresh)
    return (fleet.running == 0) & (fleet.waiting == 0) & ~fed


def _gaining(situation: Situation, strategies: Strategies, behind: Ints) -> Ints:
    """The largest set of rows in which pulling pays for each, when the new work is shared among them and the
    instances that hold the newest version and have places left."""
    fleet, cost = situation.fleet, situation.cost
    horizon = strategies.horizon * situation.pace.step_s or PULLS_IN_HORIZON * situation.pull_s or 1.0
    work, new_context = _new_work(situation, behind)
    running, context = fleet.running[behind], fleet.context[behind]
    most = _acceptable(situation, strategies, behind, new_context)
    there = np.flatnonzero(fleet.alive & (fleet.version >= situation.newest))
    typical = np.full(len(there), new_context.mean() if len(behind) else 0.0)
    sharing = np.count_nonzero(_acceptable(situation, strategies, there, typical))
    stay = cost.throughputs(running, context) * horizon
    left = np.maximum(0.0, horizon - situation.pull_s - cost.per_prefill_token * context)
    chosen, too_many = behind[:0], len(behind) + 1
    while len(chosen) + 1 < too_many:  # fewer pullers have larger shares, so more of them gain: bisect for the most
        pullers = (len(chosen) + too_many) // 2
        share = np.minimum(work / (pullers + sharing), most)
        more = left * cost.throughputs(running + share, context + share * new_context) - stay
        if np.count_nonzero(more > 0) >= pullers:
            chosen = behind[np.argsort(-more, kind="stable")[:pullers]]
        else:
            too_many = pullers
    return chosen


def _new_work(situation: Situation, rows: Ints) -> tuple[Floats, Floats]:
    """For each row: how many queued trajectories the newest version may take and the row's may not; their context."""
    queue, room, size = situation.queue, situation.room, situation.group_size
    fresh = situation.reserved
    end = min(len(queue), fresh + max(0, room.get(situation.newest, 0)) * size)
    tokens = np.cumsum([0] + [item.context for item in queue[:end]])
    versions, where = np.unique(situation.fleet.version[rows], return_inverse=True)
    counts, means = np.zeros(len(versions)), np.zeros(len(versions))
    for at, version in enumerate(versions.tolist()):
        reserved = bisect_right(queue, version, hi=fresh, key=lambda item: item.level)
        takes = min(end, fresh + max(0, room.get(version, 0)) * size)
        counts[at] = count = fresh - reserved + end - takes
        means[at] = (tokens[fresh] - tokens[reserved] + tokens[end] - tokens[takes]) / max(1, count)
    return counts[where], means[where]


def _acceptable(situation: Situation, strategies: Strategies, rows: Ints, context: Floats) -> Ints:
    """How many more trajectories of ``context`` routing would give each row, by its slots, its memory and ``mu``."""
    fleet, cost = situation.fleet, situation.cost
    running, held = fleet.running[rows], fleet.context[rows]
    by_memory = fleet.kv_free[rows] // np.maximum(1.0, context + strategies.headroom)
    most = np.minimum(fleet.max_running[rows] - running, by_memory.astype(np.int64))
    most = np.where(fleet.waiting[rows] > 0, 0, np.maximum(0, most))
    if strategies.routing != "waterfall":
        return most
    least = least_gain(situation, strategies) / cost.step_times(np.ones(len(rows)), context)
    low = np.zeros_like(most)
    while (low < most).any():  # the marginal gain falls with every trajectory: bisect for the last that is enough
        middle = (low + most + 1) // 2
        with_it = cost.throughputs(running + middle, held + middle * context)
        without = cost.throughputs(running + middle - 1, held + (middle - 1) * context)
        enough = with_it - without >= least
        low, most = np.where(enough, middle, low), np.where(enough, most, middle - 1)
    return low
