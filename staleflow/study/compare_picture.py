"""A comparison as one SVG: throughput against staleness, then the timelines of ours and of the best bounded peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staleflow.observe.chart import HEIGHT, Curve, chart, document, stacked
from staleflow.simulate.cluster import Cluster
from staleflow.study.compare import Comparison, Row
from staleflow.study.peers import STALEFLOW, Policy
from staleflow.study.timeline import Timeline, elements


def picture(comparison: Comparison, rows: Sequence[Row]) -> str:
    lines = [
        Curve(
            policy.name,
            [(row["staleness"], row["trained_tokens_per_s"], row["ci95"] or 0.0) for row in _of(policy, rows)],
            dashed=not policy.promises_bound,
        )
        for policy in comparison.policies
    ]
    first = chart(
        lines,
        title=f"{comparison.setting.name}: trained tokens/s against the staleness bound (dashed: bound not promised)",
        x_name="staleness bound",
        limits=[("no-bubble limit", comparison.limit)],
    )
    parts = [(first, float(HEIGHT))]
    for policy in _shown(comparison, rows):
        parts.append(_timeline(comparison, policy))
    return document(stacked(parts), sum(height for _, height in parts), "Comparison of policies")


def _of(policy: Policy, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["policy"] == policy.name]


def _shown(comparison: Comparison, rows: Sequence[Row]) -> list[Policy]:
    """Ours, and the fastest of the peers that kept the first bound."""
    bound = comparison.bounds[0]
    speed = {
        row["policy"]: row["trained_tokens_per_s"]
        for row in rows
        if row["staleness"] == bound and not row["violations"]
    }
    ours = [policy for policy in comparison.policies if policy.name == STALEFLOW.name]
    peers = [policy for policy in comparison.policies if policy.base != STALEFLOW.name and policy.name in speed]
    return ours + sorted(peers, key=lambda policy: -speed[policy.name])[:1]


def _timeline(comparison: Comparison, policy: Policy) -> tuple[str, float]:
    bound, seed = comparison.bounds[0], comparison.seeds[0]
    setting = replace(comparison.split(policy, bound), staleness=bound)
    cluster = Cluster(policy.fit(setting), seed, policy=policy)
    timeline = Timeline(cluster)
    cluster.run()
    return elements(timeline)
