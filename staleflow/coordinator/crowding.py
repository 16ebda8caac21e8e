"""How full instances should be: as full as the longest trajectories can bear, and not much fuller.

With ``n`` trajectories on each of ``I`` instances a decoding step takes ``s(n)``. Then the fleet needs ``W s / (I n)``
seconds for a batch of ``W`` tokens, and the longest trajectory of ``l`` tokens ends ``l s`` seconds after its start; by
the law a step lasts at least ``l s / (bound + 1)``. More trajectories make the first shorter and the second longer.
They are equal, whatever a step costs, with ::

    n = W (bound + 1) / (I l)

on each instance. Up to the knee of the cost model, where a step starts to take longer with every sequence, more
trajectories cost the longest one nothing that they do not give back later: it runs as much faster while they are gone.
So fresh work is started at once up to the knee, or to somewhat more than ``n`` where that is more; but never to more
than KV memory will hold when all have grown: what does not fit is thrown out and prefilled again.

That number becomes the least marginal gain for which the waterfall starts fresh work (``mu``). An instance that holds
long contexts gains less from another trajectory than one that holds short ones, and so gets fewer.
"""

from __future__ import annotations

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.situation import Situation

MARGIN = 1.4
"""How much more than the even number: work does not come evenly, and what starts early ends early."""

FILLED = 0.8
"""The share of KV memory that trajectories of mean size may fill: some instances will get longer ones than others."""


def fitting_mu(situation: Situation) -> float | None:
    """The ``mu`` at which instances become as full as they should; None while too little is known."""
    pace, fleet, queue = situation.pace, situation.fleet, situation.queue
    instances = int(fleet.alive.sum())
    if not (pace.longest_tokens and situation.batch_size and instances and queue and queue[-1].version is None):
        return None
    batch = situation.batch_size * situation.group_size * pace.mean_tokens
    even = batch * (situation.max_staleness + 1) / (instances * pace.longest_tokens)
    prompt = queue[-1].context
    memory = int((fleet.kv_free + fleet.context)[fleet.alive].max())
    fitting = FILLED * memory / (prompt + pace.grown_tokens)
    wanted = max(knee(situation.cost), MARGIN * even)
    return gain_at(situation.cost, min(wanted, fitting), prompt, pace.grown_tokens)


def knee(cost: CostModel) -> float:
    """Sequences up to which a step takes no longer for their number alone."""
    return max(1.0, (cost.floor - cost.base) / cost.per_sequence) if cost.per_sequence else 1.0


def gain_at(cost: CostModel, running: float, prompt: int, grown: float) -> float:
    """What the last of so many sequences gains, as a share of what it would gain on an empty instance."""
    before = max(0, int(running) - 1)
    context = int(before * (prompt + grown))
    gain = cost.throughput(before + 1, context + prompt) - cost.throughput(before, context)
    return min(1.0, max(0.0, gain * cost.step(1, prompt)))
