"""The report of a training step."""

from collections import Counter
from dataclasses import dataclass

from staleflow.training.packed import Metrics


@dataclass(slots=True)
class StepReport:
    step: int
    groups: int
    tokens: int
    """Generated tokens of all groups, those without a signal included."""
    reward: float
    """Mean reward as the reward function gave it."""
    shaped_reward: float
    """Mean reward with the overlong penalty, which advantages are computed from."""
    loss: float
    gradient_norm: float
    """Largest norm among the updates, before clipping."""
    learning_rate: float
    updates: int
    """0: no group had a signal, and the model has not changed."""
    groups_without_signal: int
    """Groups whose advantages are all 0. With a value head that is not known in advance, and none is counted."""
    tokens_without_signal: int
    max_staleness: int
    """Largest staleness of any token, from the versions stamped on them."""
    token_staleness: Counter[int]
    trajectory_staleness: Counter[int]
    """Trajectories by the staleness of their oldest token."""
    metrics: dict[str, float]
    early_s: float
    """Seconds that the device worked on gradients before the step was complete."""


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Means and peaks over the computed tokens, and what is derived from them.

    ``clip_fraction`` = ``clip_low`` + ``clip_high``;   ``explained_variance`` = 1 - E (V - R)^2 / (E R^2 - (E R)^2).
    """
    found = metrics.values()
    if "clip_low" in found:
        found["clip_fraction"] = found["clip_low"] + found["clip_high"]
    if "returns" in found:
        variance = found["returns_squared"] - found["returns"] ** 2
        found["explained_variance"] = 1 - found["value_error_squared"] / variance if variance > 0 else 0.0
    return found
