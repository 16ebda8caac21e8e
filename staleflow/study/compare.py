"""Several policies on one workload, paired: the same prompts and lengths for all of them under each seed.

A row is one policy under one bound, over all seeds. Nothing in it is taken from what a policy reports of itself.
The same part of every run is trimmed (``first_counted``). Rows do not depend on ``jobs``. Use::

    comparison = Comparison(preset("paper-14b"), chosen("all"), bounds=[1, 2], seeds=range(1, 6), tune=True, jobs=8)
    comparison.rows()
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import sqrt
from statistics import fmean, stdev

from staleflow.simulate.cluster import Cluster
from staleflow.simulate.faults import arm
from staleflow.simulate.setting import Setting
from staleflow.study.law import BatchWork, Law, balance, ceiling, even_ceiling, in_turn, limit, splits, work_of
from staleflow.study.parallel import Row, Run, Runner, T, Unit
from staleflow.study.peers import STALEFLOW, Policy
from staleflow.study.result import row, speed

TUNING_SEED = 90_001
"""Splits are tuned on a workload that nothing is measured on."""
SHARES = (0.8, 1.2, 1.8, 2.6)
"""Splits that are tried first: instances, as multiples of those that would keep up with the trainer if nothing waited.
Two more follow, halfway to the neighbours of the best."""
TRIED = 6

# Two-sided 95 % points of Student's distribution for 1, 2, ... degrees of freedom; the last for all above.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    return STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * stdev(values) / sqrt(len(values))


@dataclass(slots=True)
class Comparison:
    setting: Setting
    policies: Sequence[Policy]
    bounds: Sequence[int]
    seeds: Sequence[int]
    tune: bool = False
    faults: int = 0
    on_run: Callable[[str], None] = lambda _: None
    """Called with a description of each run before it starts."""
    on_share: Callable[[float], None] = lambda _: None
    """Called with the share of the work that is done."""
    runs: MutableMapping[str, Row] = field(default_factory=dict[str, Row])
    """Finished runs by ``key``: they are not simulated again."""
    jobs: int = 1
    """Processes to simulate in."""
    _work: BatchWork | None = None

    @property
    def work(self) -> BatchWork:
        if self._work is None:
            self._work = work_of(self.setting)
        return self._work

    @property
    def limit(self) -> float:
        """The no-bubble limit, in tokens per second."""
        return limit(self.setting, self.work)

    def rows(self) -> list[Row]:
        found = iter(self._finish(self.units()))
        rows: list[Row] = []
        for bound in self.bounds:
            rows += self._rows_of(bound, {policy.name: next(found) for policy in self.policies})
        return rows

    def _rows_of(self, bound: int, runs: Mapping[str, Sequence[Row]]) -> list[Row]:
        first = first_counted(self.setting.steps, bound)
        speeds = {name: [speed(run["commits"], first) for run in found] for name, found in runs.items()}
        kept = {
            policy.name: fmean(speeds[policy.name])
            for policy in self.policies
            if policy.base != STALEFLOW.name
            and policy.name == policy.base  # as it ships
            and not any(run["violations"] for run in runs[policy.name])
        }
        best = speeds[max(kept, key=lambda name: kept[name])] if kept else None
        return [
            self._row(policy, bound, runs[policy.name], speeds[policy.name], speeds.get("synchronous"), best)
            for policy in self.policies
        ]

    def _row(
        self,
        policy: Policy,
        bound: int,
        runs: Sequence[Row],
        speeds: Sequence[float],
        synchronous: Sequence[float] | None,
        best: Sequence[float] | None,
    ) -> Row:
        law = self.law(policy, bound)
        tokens = sum(run["trained_tokens"] for run in runs)
        wasted = _total([run["wasted"] for run in runs])
        histogram = _total([run["staleness_histogram"] for run in runs])
        return {
            "policy": policy.name,
            "staleness": bound,
            "seeds": len(runs),
            "rollout_gpus": runs[0]["rollout_gpus"],
            "training_gpus": runs[0]["training_gpus"],
            "trained_tokens_per_s": fmean(speeds),
            "ci95": half_width(speeds),
            "vs_synchronous": ratio(speeds, synchronous),
            "vs_best_bounded": ratio(speeds, best),
            "percent_of_limit": 100 * fmean(speeds) / self.limit,
            "percent_of_law": 100 * fmean(speeds) / law.tokens_per_s,
            "violations": sum(run["violations"] for run in runs),
            "max_staleness": max(run["max_staleness"] for run in runs),
            "mean_staleness": sum(int(age) * count for age, count in histogram.items()) / histogram.total(),
            "wasted_fraction": wasted.total() / (tokens + wasted.total()),
            "trainer_idle": _mean([run["trainer_idle"] for run in runs]),
            "instance_idle": _mean([run["instance_idle"] for run in runs]),
            "length_shift": fmean(run["length_shift"] for run in runs),
            "lost_groups": sum(run["lost_groups"] for run in runs),
            "repeated_groups": sum(run["repeated_groups"] for run in runs),
            "wall_s_per_step": fmean(run["wall_s_per_step"] for run in runs),
            "keeps_bound": policy.promises_bound,
            "law_binds": law.binds,
            "law_tokens_per_s": law.tokens_per_s,
            "percent_of_even": None if policy.colocated else 100 * fmean(speeds) / self._even(policy, bound),
            "vs_best_bounded_ci95": ratio_half_width(speeds, best),
            "staleness_histogram": {age: count / histogram.total() for age, count in sorted(histogram.items())},
            "wasted": dict(sorted(wasted.items())),
            "hashes": [run["hash"] for run in runs],
        }

    def law(self, policy: Policy, bound: int) -> Law:
        """The ceiling for what this policy does: its consumption, its bound, the best split for that."""
        setting = self._fitted(policy, bound)
        if policy.colocated:
            return in_turn(setting, self.work)
        return ceiling(setting, setting.strategies.consume == "stream", self.work)

    def _even(self, policy: Policy, bound: int) -> float:
        setting = self._fitted(policy, bound)
        return even_ceiling(setting, setting.strategies.consume == "stream", self.work)

    def _fitted(self, policy: Policy, bound: int, split: Setting | None = None) -> Setting:
        """The setting, or a split of it, as the policy runs it, perhaps with a smaller bound."""
        used = bound if policy.most_staleness is None else min(bound, policy.most_staleness)
        return policy.fit(replace(split or self.setting, staleness=used))

    # Runs

    def units(self) -> list[Unit[list[Row]]]:
        """The runs of each policy under each bound, bound by bound; for a ``Runner``."""
        return [self._unit(policy, bound) for bound in self.bounds for policy in self.policies]

    def _unit(self, policy: Policy, bound: int) -> Unit[list[Row]]:
        split = yield from self.tuning(policy, bound)
        wanted = [self._run(policy, bound, split, seed) for seed in self.seeds]
        yield wanted
        return [_under(bound, self.runs[run.name]) for run in wanted]

    def split(self, policy: Policy, bound: int) -> Setting:
        """The setting as given, or with the split that serves the policy best; six are tried for every policy."""
        return self._finish([self.tuning(policy, bound)])[0]

    def tuning(self, policy: Policy, bound: int) -> Unit[Setting]:
        """``split``, for a ``Runner``."""
        if not self.tune or policy.colocated:
            return self.setting
        ways = {split.instances: split for split in splits(self.setting)}
        fair = balance(self.setting, self.work).instances

        def nearest(instances: float) -> int:
            return min(ways, key=lambda each: abs(each - instances))

        def trial(instances: int) -> Run:
            return self._run(policy, bound, ways[instances], TUNING_SEED)

        def fast(instances: int) -> float:
            return speed(self.runs[trial(instances).name]["commits"], first_counted(self.setting.steps, bound))

        tried = sorted({nearest(share * fair) for share in SHARES})
        yield [trial(each) for each in tried]
        best = tried.index(max(tried, key=fast))
        beside = [tried[at] for at in (best - 1, best + 1) if 0 <= at < len(tried)]
        tried += [nearest((tried[best] + other) / 2) for other in beside]
        if len(beside) < 2:  # the best is at an end of what was tried: look beyond it
            tried.append(nearest(tried[best] * (0.8 if best == 0 else 1.2)))
        yield [trial(each) for each in tried]
        return ways[max(tried, key=fast)]

    def _run(self, policy: Policy, bound: int, split: Setting, seed: int) -> Run:
        setting = self._fitted(policy, bound, split)
        what = f"{policy.name}, bound {bound}, {setting.instances} instances, seed {seed}"
        return run_of(policy, setting, seed, what, self.faults)

    def _finish(self, units: Sequence[Unit[T]]) -> list[T]:
        with Runner(self.runs, self.jobs, self.on_run, self.on_share, self._foreseen()) as runner:
            return runner.finish(units)

    def _foreseen(self) -> float:
        """About the sizes of all runs."""
        tuned = sum(not policy.colocated for policy in self.policies) * TRIED if self.tune else 0
        runs = len(self.seeds) * len(self.policies) + tuned
        return runs * sum(size_of(replace(self.setting, staleness=bound)) for bound in self.bounds)


def run_of(policy: Policy, setting: Setting, seed: int, what: str, faults: int = 0) -> Run:
    """A run to be simulated, of a setting that fits the policy."""
    return Run(key(policy, setting, seed, faults), what, simulate, (policy, setting, seed, faults), size_of(setting))


def size_of(setting: Setting) -> float:
    """How long the run takes to simulate, relative to others: trajectories in it, and a little for each instance."""
    return setting.groups * setting.group_size * (setting.steps + setting.staleness + 1) + setting.instances


def _under(bound: int, run: Row) -> Row:
    """The run with its violations of the requested bound: a policy that uses less of it was run with less."""
    return run | {"violations": sum(count for age, count in run["group_staleness"].items() if int(age) > bound)}


def first_counted(steps: int, bound: int) -> int:
    """The step from whose commit on a run is measured: past the first quarter and the steps that fill the window.

    Where the tail binds, steps repeat in cycles of ``bound + 1``: some without a wait, then a long one. So a whole
    number of cycles is measured, if there is one.
    """
    first = max(steps // 4, bound + 1)
    left = steps - 1 - first
    return first + left % (bound + 1) if left > bound else first


def key(policy: Policy, setting: Setting, seed: int, faults: int = 0) -> str:
    """A name that is different for every run that could come out differently, but for the code itself."""
    return blake2b(repr((policy.name, setting, seed, faults)).encode(), digest_size=12).hexdigest()


def simulate(policy: Policy, setting: Setting, seed: int, faults: int = 0) -> Row:
    """One run of a setting that fits the policy."""
    began = time.perf_counter()
    cluster = Cluster(setting, seed, policy=policy)
    if faults:
        arm(cluster, faults)
    cluster.run()
    return run_row(cluster, time.perf_counter() - began)


def run_row(cluster: Cluster, wall_s: float) -> Row:
    """The row of ``staleflow simulate``, and what ``speed`` needs."""
    recorder = cluster.recorder
    return row(cluster, wall_s) | {
        "commits": [(step.time, step.tokens) for step in recorder.steps],
        "group_staleness": {str(age): count for age, count in recorder.group_staleness.items()},
    }


def ratio(these: Sequence[float], those: Sequence[float] | None) -> float | None:
    """Mean of the ratios of paired runs."""
    return fmean(_ratios(these, those)) if those else None


def ratio_half_width(these: Sequence[float], those: Sequence[float] | None) -> float | None:
    return half_width(_ratios(these, those)) if those else None


def _ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [this / that for this, that in zip(these, those, strict=True)]


def _total(parts: Sequence[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


def _mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    causes = sorted({cause for part in parts for cause in part})
    return {cause: fmean(part.get(cause, 0.0) for part in parts) for cause in causes}
