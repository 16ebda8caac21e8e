"""How full instances should be: as full as the longest trajectories can bear, and not much fuller.

With ``n`` trajectories on each of ``I`` instances a decoding step takes ``s(n)``. Then the fleet needs ``W s / (I n)``
seconds for a batch of ``W`` tokens, and the longest trajectory of ``l`` tokens ends ``l s`` seconds after its start; by
the law a step lasts at least ``l s / (bound + 1)``. More trajectories make the first shorter and the second longer.
They are equal, whatever a step costs, with ::

    n = W (bound + 1) / (I l)

on each instance. So fresh work is started where it gains at least the configured ``mu``; where the longest trajectories
can bear fuller instances than that, also for less, up to somewhat more than ``n``; but never more than KV memory will
hold when all have grown: what does not fit is thrown out and prefilled again.

All three numbers are compared as least marginal gains for the waterfall. An instance that holds long contexts gains
less from another trajectory than one that holds short ones, and so gets fewer.
"""

from __future__ import annotations

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.situation import Situation
from staleflow.coordinator.strategies import Strategies

MARGIN = 1.4
"""How much more than the even number: work does not come evenly, and what starts early ends early."""

FILLED = 0.8
"""The share of KV memory that trajectories of mean size may fill: some instances will get longer ones than others."""


def fitting_mu(situation: Situation, mu: float) -> float | None:
    """What to use for ``mu`` so that instances become as full as they should; None while too little is known."""
    pace, fleet, queue = situation.pace, situation.fleet, situation.queue
    alive = fleet.alive.tolist()
    instances = sum(alive)
    if not (pace.longest_tokens and situation.batch_size and instances and queue and queue[-1].version is None):
        return None
    batch = situation.batch_size * situation.group_size * pace.mean_tokens
    even = batch * (situation.max_staleness + 1) / (instances * pace.longest_tokens)
    prompt = queue[-1].context
    each = zip(alive, fleet.kv_free.tolist(), fleet.context.tolist(), strict=True)
    memory = max([free + context for there, free, context in each if there])
    fitting = FILLED * memory / (prompt + pace.grown_tokens)
    bearable = gain_at(situation.cost, MARGIN * even, prompt, pace.grown_tokens)
    return max(min(mu, bearable), gain_at(situation.cost, fitting, prompt, pace.grown_tokens))


def least_gain(situation: Situation, strategies: Strategies) -> float:
    """The ``mu`` to decide by."""
    return strategies.mu if situation.mu is None else situation.mu


def gain_at(cost: CostModel, running: float, prompt: int, grown: float) -> float:
    """What the last of ``running`` sequences gains, as a share of what it would gain on an empty instance."""
    before = max(0, int(running) - 1)
    context = int(before * (prompt + grown))
    gain = cost.throughput(before + 1, context + prompt) - cost.throughput(before, context)
    return min(1.0, max(0.0, gain * cost.step(1, prompt)))
