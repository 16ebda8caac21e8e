"""Fit the cost model of the coordinator to measured decoding steps.

The model is linear but for one corner: below some number of sequences a step costs as much as if there were that many
(reading the weights), above it each sequence costs. So for each possible corner the rest is least squares, and the best
corner wins. Errors are relative, since a step of 1 ms matters as much as one of 100. ::

    model, errors = fit(points, prefill_s_per_token)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from staleflow.coordinator.cost import CostModel


class Point(NamedTuple):
    """One measured cell: running sequences, their tokens of context together, seconds of a step."""

    running: int
    context: int
    seconds: float


class Errors(NamedTuple):
    mean: float
    """Mean of |predicted / measured - 1| over the points that were fitted."""
    worst: float
    unseen: float
    """The same mean over points that were left out of the fit, each once."""


class Profile(NamedTuple):
    model: CostModel
    errors: Errors
    points: list[Point]
    prefill: list[tuple[int, float]]
    """Tokens, and the seconds of a step that prefills them."""

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON, with the paper's names beside ours."""
        model = self.model
        return {
            "coefficients": {name: getattr(model, name) for name in type(model).__slots__},
            "paper": {
                "k1": model.per_context_token,
                "k2": model.floor,
                "k3": model.per_sequence,
                "k4": model.fixed,
            },
            "error": self.errors._asdict(),
            "points": [point._asdict() for point in self.points],
            "prefill": [{"tokens": tokens, "seconds": seconds} for tokens, seconds in self.prefill],
        }


def fit(points: Sequence[Point], per_prefill_token: float = 0.0) -> tuple[CostModel, Errors]:
    if len({point.running for point in points}) < 2 or len(points) < 4:
        raise ValueError(f"{len(points)} points cannot fit the cost model: measure at least 4, with 2 sizes of batch")
    model = _fit(points, per_prefill_token)
    off = _off(model, points)
    left_out = [
        _off(_fit([*points[:at], *points[at + 1 :]], per_prefill_token), [point])[0] for at, point in enumerate(points)
    ]
    return model, Errors(float(off.mean()), float(off.max()), float(np.mean(left_out)))


def _fit(points: Sequence[Point], per_prefill_token: float) -> CostModel:
    running, context, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    best: tuple[float, float, NDArray[np.float64]] | None = None
    for corner in sorted({0.0, *running}):
        columns = np.stack([np.ones_like(running), np.maximum(running - corner, 0), context], 1)
        found = _not_negative(columns / seconds[:, None], np.ones_like(seconds))
        error = float(np.abs(columns @ found / seconds - 1).sum())
        if best is None or error < best[0]:
            best = error, corner, found
    assert best is not None
    _, corner, (floor, per_sequence, per_context) = best
    return CostModel(
        floor=float(floor),
        base=float(floor - per_sequence * corner),
        per_sequence=float(per_sequence),
        fixed=0.0,
        per_context_token=float(per_context),
        per_prefill_token=per_prefill_token,
    )


def _not_negative(columns: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with no coefficient below zero; there are three, so every choice of them is tried that has the
    first: no step takes no time, however noisy the points are."""
    count = columns.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for chosen in range(1, 2**count, 2):
        kept = [at for at in range(count) if chosen >> at & 1]
        found = np.linalg.lstsq(columns[:, kept], target, rcond=None)[0]
        rest = target - columns[:, kept] @ found
        if (found >= 0).all() and rest @ rest < least:
            best, least = np.zeros(count), float(rest @ rest)
            best[kept] = found
    return best


def _off(model: CostModel, points: Sequence[Point]) -> NDArray[np.float64]:
    return np.array([abs(model.step(point.running, point.context) / point.seconds - 1) for point in points])
