"""The result of a simulated run: one flat row of plain values, and the same as a table for people.

Everything is counted from what happened (the tokens' own version stamps, the engines' busy time, the journal), never
from what a policy reports. All but ``wall_s_per_step`` are the same for the same setting, seed and faults. Use::

    began = time.perf_counter()
    cluster.run()
    print(json.dumps(row(cluster, time.perf_counter() - began)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from staleflow.simulate.cluster import Cluster
from staleflow.simulate.instance import Instance
from staleflow.simulate.invariants import lost_prompts


def row(cluster: Cluster, wall_s: float) -> dict[str, Any]:
    """The row of a run that has ended. The names up to ``hash`` are relied on outside; new ones go after it."""
    setting, recorder = cluster.setting, cluster.recorder
    staleness, wasted = recorder.token_staleness, sum(recorder.wasted.values())
    return {
        "policy": cluster.policy.name,
        "staleness": setting.staleness,
        "rollout_gpus": setting.instances * setting.gpus_per_instance,
        "training_gpus": setting.training_gpus,
        "trained_tokens_per_s": throughput(cluster),
        "violations": recorder.violations,
        "max_staleness": max(staleness),
        "mean_staleness": sum(age * count for age, count in staleness.items()) / staleness.total(),
        "staleness_histogram": {str(age): count for age, count in sorted(staleness.items())},
        "wasted_fraction": wasted / (recorder.trained_tokens + wasted),
        "wasted": {cause: count for cause, count in sorted(recorder.wasted.items()) if count},
        "trainer_idle": trainer_idle(cluster),
        "instance_idle": instance_idle(cluster),
        "length_shift": length_shift(cluster),
        "lost_groups": len(lost_prompts(cluster)),
        "repeated_groups": sum(times > 1 for times in recorder.trained_prompts.values()),
        "wall_s_per_step": wall_s / len(recorder.steps),
        "hash": cluster.journal.digest(),
        "preset": setting.name,
        "seed": cluster.keyed.seed,
        "steps": len(recorder.steps),
        "instances": setting.instances,
        "groups": setting.groups,
        "group_size": setting.group_size,
        "redundancy": setting.redundancy,
        "extra_members": setting.extra_members,
        "simulated_s": cluster.loop.time(),
        "trained_tokens": recorder.trained_tokens,
        "pulls": sum(rollout.pulls for rollout in cluster.rollouts),
        "cost_model_error": cluster.control.cost_error,
        "preemptions": sum(rollout.engine.instance.preemptions for rollout in cluster.rollouts),
        "events": cluster.journal.position,
    }


def throughput(cluster: Cluster, first: int | None = None) -> float:
    """Output tokens of trained trajectories per simulated second, from the commit of step ``first`` to the last one.

    A run starts with empty instances and a waiting trainer. What the bound lets pile up meanwhile is gone after as
    many steps as the bound, so ``first`` is ``staleness`` by default. A run with no step after that one is measured
    whole, with its start.
    """
    commits = [(step.time, step.tokens) for step in cluster.recorder.steps]
    return speed(commits, cluster.setting.staleness if first is None else first)


def speed(commits: Sequence[tuple[float, int]], first: int) -> float:
    """Trained output tokens per second from the commit of step ``first`` to the last; over all if none follows."""
    start = commits[first][0] if len(commits) > first + 1 else 0.0
    counted = commits[first + 1 :] or commits
    return sum(tokens for _, tokens in counted) / (commits[-1][0] - start)


def trainer_idle(cluster: Cluster) -> dict[str, float]:
    """Shares of the simulated time in which the trainer had nothing to train, by what it waited for."""
    whole = cluster.loop.time()
    return {cause: seconds / whole for cause, seconds in sorted(cluster.trainer.idle.items()) if seconds}


def instance_idle(cluster: Cluster) -> dict[str, float]:
    """Shares of the time of all instances in which they loaded weights, were down, or had nothing to run."""
    now = cluster.loop.time()
    whole = sum(now - rollout.born for rollout in cluster.rollouts)
    down = sum(rollout.down_seconds for rollout in cluster.rollouts) / whole
    pull = sum(rollout.pull_seconds for rollout in cluster.rollouts) / whole
    busy = sum(busy_seconds(rollout.engine.instance, now) for rollout in cluster.rollouts) / whole
    # A pull waits for the step under way, which is busy time too: so the rest may fall below 0 by a step's length.
    idle = {"empty": max(0.0, 1.0 - busy - pull - down), "pull": pull}
    return idle | ({"down": down} if down else {})


def busy_seconds(engine: Instance, now: float) -> float:
    """Time spent in steps until ``now``, with those of the segment that is under way.

    An engine counts a segment when it ends; that of a long response can last minutes. The steps of a segment are all
    alike, so the tokens made in it give how many there were and how long they took.
    """
    engine.advance(now)
    load = engine.load(now)
    decoded = load.generated_tokens - engine.generated_tokens
    prefilled = load.prefilled_tokens - engine.prefilled_tokens
    steps = decoded // load.running if load.running else -(-prefilled // engine.chunk)
    if not steps:
        return engine.busy_seconds
    under_way = engine.cost.steps(steps, load.running, engine.context_tokens, prefilled // steps)
    return engine.busy_seconds + under_way / engine.speed


def length_shift(cluster: Cluster) -> float:
    """How far the lengths that were trained are from those that were offered: 0 is the same distribution.

    The Wasserstein-1 distance, which is the mean difference of their quantiles, over the mean offered length. A
    policy that drops long responses trains on shorter ones than the workload has, and this shows it. Offered are all
    members, at their first attempt, of as many prompts as were trained, in the order of the prompts: those that the
    run would have trained had it taken them in order. So what is still being generated at the end counts as missing,
    and the number shrinks with the length of the run.
    """
    setting, recorder, workload = cluster.setting, cluster.recorder, cluster.workload
    offered = [
        workload.length(prompt, member, version=prompt // setting.groups)
        for prompt in range(recorder.trained_prompts.total())
        for member in range(setting.group_size + setting.extra_members)
    ]
    return distance(offered, [length for step in recorder.steps for length in step.lengths]) / float(np.mean(offered))


def distance(these: Sequence[int], those: Sequence[int]) -> float:
    """Wasserstein-1: the area between the two distribution functions."""
    one, other = np.sort(these), np.sort(those)
    points = np.sort(np.concatenate([one, other]))
    below_one = np.searchsorted(one, points[:-1], side="right") / len(one)
    below_other = np.searchsorted(other, points[:-1], side="right") / len(other)
    return float(np.sum(np.abs(below_one - below_other) * np.diff(points)))


def table(row: Mapping[str, Any]) -> str:
    """The row for people: a heading and a line for each thing."""
    ages, tokens = row["staleness_histogram"], sum(row["staleness_histogram"].values())
    idle, starved = row["trainer_idle"], row["instance_idle"]
    lines = {
        "throughput": f"{row['trained_tokens_per_s']:,.0f} trained tokens/s (without the start)",
        "trained": f"{row['trained_tokens']:,} tokens in {row['simulated_s']:,.0f} simulated seconds",
        "staleness": f"mean {row['mean_staleness']:.2f}, at most {row['max_staleness']} of {row['staleness']}"
        + _shares({age: count / tokens for age, count in ages.items()}),
        "violations": f"{row['violations']} groups beyond the bound",
        "wasted": f"{row['wasted_fraction']:.1%} of all tokens"
        + _shares({cause: f"{count:,}" for cause, count in row["wasted"].items()}),
        "trainer idle": f"{sum(idle.values()):.1%} of the time" + _shares(idle),
        "instances idle": f"{sum(starved.values()):.1%} of the time" + _shares(starved),
        "length shift": f"{row['length_shift']:.3f} of the mean length",
        "groups": f"{row['lost_groups']} lost, {row['repeated_groups']} repeated",
        "cost": f"{row['wall_s_per_step']:.2f} s of real time for each step",
        "hash": row["hash"],
    }
    lines |= {"assumed" + " " * at: note for at, note in enumerate(row.get("notes", ()))}
    heading = (
        f"{row['preset']}, seed {row['seed']}: {row['steps']} steps of {row['groups']} groups x {row['group_size']}, "
        f"staleness up to {row['staleness']}; {row['rollout_gpus']} rollout GPUs ({row['instances']} instances), "
        f"{row['training_gpus']} training GPUs"
    )
    width = max(map(len, lines)) + 2
    return "\n".join([heading, "", *(f"{name:<{width}}{value}" for name, value in lines.items())])


def _shares(parts: Mapping[str, float | str]) -> str:
    """`` (this: 10.0%, that: 5.0%)``, or nothing where there is nothing."""
    shown = [f"{name}: {part if isinstance(part, str) else format(part, '.1%')}" for name, part in parts.items()]
    return f" ({', '.join(shown)})" if shown else ""
