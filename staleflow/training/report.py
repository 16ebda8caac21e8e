"""What is known of a step once it is trained."""

from collections import Counter
from dataclasses import dataclass

from staleflow.training.packed import Metrics


@dataclass(slots=True)
class StepReport:
    step: int
    groups: int
    tokens: int
    """Generated ones of all groups, also of those without a signal."""
    reward: float
    """The mean as the reward function gave it."""
    shaped_reward: float
    """The mean with the overlong penalty: what advantages are made of."""
    loss: float
    gradient_norm: float
    """The largest of the updates, before the clip."""
    learning_rate: float
    updates: int
    """0: no group had a signal, and the model is what it was."""
    groups_without_signal: int
    """Groups whose advantages are all 0. Where a value head gives them, it is not known before and none is counted."""
    tokens_without_signal: int
    max_staleness: int
    """Of any token, from the versions stamped on them."""
    token_staleness: Counter[int]
    trajectory_staleness: Counter[int]
    """By the oldest version in each."""
    metrics: dict[str, float]
    early_s: float
    """That the device worked on gradients before the step was complete."""


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Means and peaks over tokens that were computed, and what is derived from them.

    ``clip_fraction`` = ``clip_low`` + ``clip_high``;   ``explained_variance`` = 1 - E (V - R)^2 / (E R^2 - (E R)^2).
    """
    found = metrics.values()
    if "clip_low" in found:
        found["clip_fraction"] = found["clip_low"] + found["clip_high"]
    if "returns" in found:
        variance = found["returns_squared"] - found["returns"] ** 2
        found["explained_variance"] = 1 - found["value_error_squared"] / variance if variance > 0 else 0.0
    return found
