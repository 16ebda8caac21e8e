"""The pictures of a report: each a title and an SVG, or nothing if the run has not recorded what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from staleflow.observe.chart import HEIGHT, Curve, chart, document

Row = Mapping[str, Any]
Picture = tuple[str, str]

MOST_POINTS = 400
"""Of a line: of more steps, means over some."""
FIGURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss",)),
    ("entropy of the policy, in nats", ("policy_entropy",)),
    ("divergence from the first model, and from the model that made the responses", ("kl_reference", "approx_kl")),
    ("share of tokens that were clipped", ("clip_fraction",)),
    ("log-probabilities of engine and trainer: mean difference", ("logprob_difference",)),
    ("norm of the gradient", ("gradient_norm",)),
    ("groups without signal", ("groups_without_signal",)),
    ("share of responses cut at the limit", ("cut",)),
)
"""Title and names in ``metrics.jsonl``; those that a run does not have are left out."""


def line_of(rows: Sequence[Row], name: str) -> list[tuple[float, float, float]]:
    """The values by step, as a chart wants them."""
    found = [(row["step"], row[name]) for row in rows if _number(row.get(name))]
    return thinned(found)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    each = max(1, math.ceil(len(points) / MOST_POINTS))
    parts = [points[at : at + each] for at in range(0, len(points), each)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part), 0.0) for part in parts]


def drawn(curves: Sequence[Curve], title: str, x_name: str = "step", limits: Sequence[tuple[str, float]] = ()) -> str:
    """Empty if no curve has a point."""
    known = [curve for curve in curves if curve.points]
    return document(chart(known, title, x_name, limits), HEIGHT, title) if known else ""


def learning(rows: Sequence[Row], accuracy: Sequence[Row], binary: bool) -> Iterator[str]:
    held_out = thinned([(row["step"], row["accuracy"]) for row in accuracy if _number(row.get("accuracy"))])
    name = "held-out accuracy" if binary else "held-out reward"
    curves = [Curve("reward", line_of(rows, "reward"), dots=()), Curve(name, held_out)]
    yield drawn(curves, f"reward of each step, and {name}")
    parts = sorted({name for row in rows for name in row if name.startswith("reward/")})
    if parts:
        yield drawn([Curve(each[7:], line_of(rows, each), dots=()) for each in parts], "rewards by name")
    for title, names in FIGURES:
        yield drawn([Curve(each, line_of(rows, each), dots=()) for each in names], title)
    lengths = [(row["step"], row["lengths"]) for row in rows if row.get("lengths")]
    mean = Curve("mean", thinned([(step, fmean(each)) for step, each in lengths]), dots=())
    longest = Curve("longest", thinned([(step, float(max(each))) for step, each in lengths]), dots=())
    yield drawn([mean, longest], "tokens of a response")


def staleness(rows: Sequence[Row], bound: int) -> Iterator[str]:
    ages = [(row["step"], {int(age): n for age, n in row["token_staleness"].items()}) for row in rows
            if row.get("token_staleness")]  # fmt: skip
    oldest = max((max(each) for _, each in ages), default=0)
    shares = [
        Curve(f"{age} step{'s' * (age != 1)} old",
              thinned([(step, each.get(age, 0) / max(1, sum(each.values()))) for step, each in ages]), dots=())
        for age in range(oldest + 1)
    ]  # fmt: skip
    yield drawn(shares if ages else [], f"share of a step's tokens by age (the bound is {bound})")
    mean = [(step, sum(age * n for age, n in each.items()) / max(1, sum(each.values()))) for step, each in ages]
    top = [(step, float(max(each))) for step, each in ages]
    curves = [Curve("mean", thinned(mean), dots=()), Curve("oldest token", thinned(top), dots=())]
    yield drawn(curves, "staleness of tokens", limits=[("bound", float(bound))])


def time_by_part(rows: Sequence[Row], instances: int) -> Iterator[str]:
    named = {"trainer works": "train_s", "trainer waits": "idle_s"}
    curves = [Curve(name, line_of(rows, key), dots=()) for name, key in named.items()]
    known = [row for row in rows if _number(row.get("instances_busy_s"))]
    busy = [(row["step"], row["instances_busy_s"] / max(1, instances)) for row in known]
    yield drawn([*curves, Curve("an instance works", thinned(busy), dots=())], "seconds of each step")
    speed = [
        (row["step"], sum(row["lengths"]) / (row["time"] - before["time"]))
        for before, row in pairwise(rows)
        if row["time"] > before["time"] and row.get("lengths")
    ]
    yield drawn([Curve("tokens/s", thinned(speed), dots=())], "trained tokens per second")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
