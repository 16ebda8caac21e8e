"""Episodes of several turns under other rules, simulated: all turns in step, one batch at a time, old ones thrown away.

    python bench/agents_policies.py [--turns 8] [--tool-s 30] [--seeds 3] [--bounds 1,2,3] [--json FILE]

The same prompts, lengths and tool times for all, on the same number of GPUs (paper-14b's model, lengths and costs, an
eighth of its GPUs and 16 groups of 8 a step), each policy with the best of the tried splits between rollout and
training, found under another seed. *turns in step*: one batch at a time, and each turn of all its episodes waits for
the slowest of the turn before, with its tool. *synchronous*: one batch at a time, and every episode continues by
itself. *discard*: what is too old when a version appears is thrown away, and its prompt is drawn again.

Throughput is output tokens of trained episodes per second; *wasted* the share of output tokens that were made and not
trained; *length shift* how far the lengths that were trained are from those that were asked for (``study/result.py``):
a rule that throws long episodes away trains on others.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts, kept
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.environments import SimEnvironments
from staleflow.simulate.policy import Policy
from staleflow.simulate.setting import Setting, preset
from staleflow.study.compare import TUNING_SEED
from staleflow.study.peers import POLICIES, named
from staleflow.study.result import row

SHAPE = ("groups=16", "group_size=8", "rollout.instances=3", "cluster.training_gpus=5")
GPUS = 8
SPLITS = (2, 3, 4, 5, 6)
"""Instances that are tried."""
IN_STEP = "turns in step"


class InStep(SimEnvironments):
    """Nobody begins a turn before all that are played have ended the one before, with its tool."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._at: dict[str, int] = {}
        """By episode: the turn that it is in, or wants to begin."""
        self._in = Counter[int]()
        """How many are in each turn."""
        self._moved = asyncio.Event()

    def left(self, episode: str) -> None:
        self._move(episode, None)

    async def before_turn(self, episode: str, turn: int) -> None:
        self._move(episode, turn)
        while min(self._in) < turn:
            await self._moved.wait()

    def _move(self, episode: str, turn: int | None) -> None:
        before = self._at.pop(episode, None)
        if before is not None:
            self._in[before] -= 1
            if not self._in[before]:
                del self._in[before]
        if turn is not None:
            self._at[episode] = turn
            self._in[turn] += 1
        if before is not None and before not in self._in:
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()


class InStepCluster(Cluster):
    environments_kind = InStep


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=amounts.count, default=8)
    parser.add_argument("--tool-s", type=amounts.amount, default=30.0)
    parser.add_argument("--seeds", type=amounts.count, default=3)
    parser.add_argument("--bounds", type=amounts.wholes, default="1,2,3")
    parser.add_argument("--steps", type=amounts.count, default=10)
    parser.add_argument("--json", type=kept.to_write)
    options = parser.parse_args()
    base = replace(
        preset("paper-14b", *SHAPE, f"steps={options.steps}"),
        turns=options.turns,
        tool_s=options.tool_s,
        tool_tokens=200,
    )
    found: list[dict[str, Any]] = []
    for name, bound in arms(options.bounds):
        instances = best_split(name, replace(base, staleness=bound))
        setting = with_split(base, bound, instances)
        rows = [simulated(name, setting, seed) for seed in range(1, options.seeds + 1)]
        found.append(summary(name, bound, instances, rows))
        print(line(found[-1]), flush=True)
    if options.json:
        about = {"turns": options.turns, "tool_s": options.tool_s, "steps": options.steps, "seeds": options.seeds}
        kept.write(options.json, {"setting": about, "rows": found})
    return int(any(each["violations"] for each in found if each["policy"] != "discard"))


def arms(bounds: list[int]) -> list[tuple[str, int]]:
    names = ("discard", "staleflow")
    return [(IN_STEP, 0), ("synchronous", 0), *((name, bound) for bound in bounds for name in names)]


def policy_of(name: str) -> Policy:
    return POLICIES["synchronous"] if name == IN_STEP else named(name)


def best_split(name: str, setting: Setting) -> int:
    if policy_of(name).colocated:
        return setting.instances
    short = replace(setting, steps=max(5, setting.steps // 2))
    return max(
        SPLITS,
        key=lambda each: simulated(name, with_split(short, setting.staleness, each), TUNING_SEED)[
            "trained_tokens_per_s"
        ],
    )


def with_split(setting: Setting, bound: int, instances: int) -> Setting:
    return replace(setting, staleness=bound, instances=instances, training_gpus=GPUS - instances)


def simulated(name: str, setting: Setting, seed: int) -> dict[str, Any]:
    policy = policy_of(name)
    began = time.perf_counter()
    cluster = (InStepCluster if name == IN_STEP else Cluster)(policy.fit(setting), seed, policy=policy)
    cluster.run()
    return row(cluster, time.perf_counter() - began)


def summary(name: str, bound: int, instances: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "policy": name,
        "bound": bound,
        "instances": "all" if policy_of(name).colocated else instances,
        "tokens_per_s": fmean(each["trained_tokens_per_s"] for each in rows),
        "wasted": fmean(each["wasted_fraction"] for each in rows),
        "length_shift": fmean(each["length_shift"] for each in rows),
        "max_staleness": max(each["max_staleness"] for each in rows),
        "violations": sum(each["violations"] for each in rows),
        "runs": [{key: each[key] for key in ("seed", "trained_tokens_per_s", "wasted_fraction")} for each in rows],
    }


def line(each: dict[str, Any]) -> str:
    return (
        f"| {each['policy']} | {each['bound']} | {each['instances']} | {each['tokens_per_s']:,.0f} | "
        f"{each['wasted']:.1%} | {each['length_shift']:+.1%} | {each['max_staleness']} | {each['violations']} |"
    )


if __name__ == "__main__":
    sys.exit(main())
