"""Faults by the thousand in simulated runs, with every invariant checked on the way.

    python bench/chaos_simulated.py                                # 10,000 faults in two processes: a table
    python bench/chaos_simulated.py --faults 100000 --json FILE    # more of them, and the figures as JSON
    python bench/chaos_simulated.py --seconds 60 --kinds crash,kill_control
    python bench/chaos_simulated.py --again 139                    # one run again, with its faults printed

A run is a random small cluster with up to 40 faults; everything about it follows from its seed. The production
control plane and rollout worker run in it unchanged (``docs/simulator.md``). Half of the runs have faults of one kind
only, so that each kind has figures of its own; the others mix all kinds. After every instant ``simulate/invariants.py``
looks whether anything is lost, trained twice or too late, or stands still. A failing seed is a bug report: it is
printed with the command that runs it again, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts, kept
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import StaleFlowError
from staleflow.simulate import faults, invariants
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.disk import FAULT
from staleflow.simulate.lengths import Bimodal, Lognormal, PowerLaw, Uniform
from staleflow.simulate.setting import Setting, preset
from staleflow.simulate.workload import Sampled, Workload

BASE = preset("paper-14b")
LENGTHS = (
    Lognormal.from_mean(400, 1.0),
    Uniform(50, 900),
    PowerLaw(60, 1.3),
    Bimodal(100, 2_000, 0.2),
)
TIMEOUTS_S = (60.0, 12.0)
"""Silence after which an instance is taken for dead."""
KINDS = tuple(faults.FAULTS)
MIXED = "mixed"
FAULTS_PER_RUN = (5, 15, 40)
"""By seed; a run may end before all of them have happened."""


def setting_of(seed: int) -> Setting:
    """Sizes, strategies and lengths that depend only on the seed."""
    random = Random(seed)
    groups = random.choice((2, 4))
    filtered = random.random() < 0.3
    prompts = random.choice((None, None, groups * 6 + random.choice((0, 1, 5))))
    return replace(
        BASE,
        name=f"scenario {seed}",
        instances=random.choice((2, 3, 4)),
        groups=groups,
        group_size=random.choice((2, 4)),
        staleness=random.choice((0, 1, 2, 3)),
        steps=1 + seed // 5 % 2 if seed % 5 == 3 else 6,  # where there are few, much happens around the last
        training_gpus=4,
        redundancy=random.choice((0, 0, 1)),
        extra_members=random.choice((0, 0, 1)),
        filter="no-signal" if filtered else "none",
        reward_s=random.choice((0.0, 3.0)),
        prompts=None if filtered else prompts,  # prompts without signal are not drawn again
        workload=Workload(
            Sampled(random.choice(LENGTHS), between=random.choice((0.0, 0.5, 0.9))),
            max_tokens=4_000,
            drift=random.choice((0.0, 0.05)),
        ),
        kv_tokens=random.choice((8_000, 20_000)),
        max_running=random.choice((4, 16)),
        strategies=Strategies(
            consume=random.choice(("stream", "batch")),
            routing=random.choice(("waterfall", "least_loaded", "round_robin")),
            synchronisation=random.choice(("gain", "greedy", "starved")),
            migration=random.choice(("gain", "off")),
            tail=random.choice(("wait", "wait", "replace", "truncate")),
            tail_patience=random.choice((0.1, 0.5)),
            mu=random.choice((0.0, 0.1, 0.5)),
        ),
    )


@dataclass(slots=True)
class Trial:
    """One run, and the faults that have happened in it."""

    cluster: Cluster
    happened: Counter[str]
    longest_s: float = 0.0
    """The longest that a version took, in simulated seconds."""

    @classmethod
    def of(
        cls, seed: int, count: int = 6, setting: Setting | None = None, names: tuple[str, ...] = KINDS, every: int = 0
    ) -> Trial:
        """``every``: see ``invariants.watch``."""
        timeout_s = TIMEOUTS_S[seed // 2 % len(TIMEOUTS_S)]
        cluster = Cluster(
            setting or setting_of(seed), seed, keep_journal=True, shuffle=seed % 2 == 1, instance_timeout_s=timeout_s
        )
        if cluster.setting.prompts is not None:
            names = tuple(name for name in names if name not in faults.GIVING_UP)
        happened = faults.arm(cluster, count, names) if count and names else Counter[str]()
        invariants.watch(cluster, every or (1 if seed % 10 == 0 else 16))
        return cls(cluster, happened)

    def run(self) -> None:
        try:
            self.cluster.run()
        finally:
            times = [0.0, *(step.time for step in self.cluster.recorder.steps), self.cluster.loop.now]
            self.longest_s = max(later - earlier for earlier, later in pairwise(times))


def run(seed: int, count: int = 6, setting: Setting | None = None, names: tuple[str, ...] = KINDS) -> Cluster:
    """One run with ``count`` faults among those named, checked after every instant and at the end."""
    trial = Trial.of(seed, count, setting, names)
    trial.run()
    return trial.cluster


def kind_of(seed: int, kinds: tuple[str, ...]) -> str:
    """The kind of all faults in this run; in half of the runs, all kinds."""
    return kinds[seed // 4 % len(kinds)] if seed % 4 < 2 else MIXED


def trial_of(seed: int, kinds: tuple[str, ...]) -> Trial:
    kind, setting = kind_of(seed, kinds), setting_of(seed)
    if kind in faults.GIVING_UP:
        setting = replace(setting, prompts=None)
    count = FAULTS_PER_RUN[seed % len(FAULTS_PER_RUN)]
    return Trial.of(seed, count, setting, kinds if kind == MIXED else (kind,), every=1)


# Figures


@dataclass(slots=True)
class Figures:
    """Sums over runs."""

    runs: int = 0
    faults: int = 0
    groups: int = 0
    """Trained."""
    lost: int = 0
    repeated: int = 0
    violations: int = 0
    hangs: int = 0
    ended: int = 0
    """Runs that ended in any other way than with their last step."""
    tokens: int = 0
    """Trained."""
    made_again: int = 0
    """Tokens made more than once, because they were lost or an instance was taken for dead."""
    longest_s: float = 0.0
    """The longest that a version took, in simulated seconds."""

    def add(self, other: Figures) -> None:
        for name in self.__slots__:
            one, two = getattr(self, name), getattr(other, name)
            setattr(self, name, max(one, two) if name == "longest_s" else one + two)


@dataclass(slots=True)
class Outcome:
    seed: int
    kind: str
    figures: Figures
    happened: Counter[str]
    cpu_s: float
    failure: str = ""


def outcome_of(seed: int, kinds: tuple[str, ...]) -> Outcome:
    began, trial, failure = time.process_time(), trial_of(seed, kinds), ""
    try:
        trial.run()
    except Exception as error:  # whatever ends a run is what we look for
        failure = f"{type(error).__name__}: {error}"
    recorder = trial.cluster.recorder
    stood = bool(failure) and any(word in failure for word in ("Stalled", "Deadlock", "no version was made"))
    figures = Figures(
        runs=1,
        faults=trial.happened.total(),
        groups=recorder.trained_prompts.total(),
        lost=0 if trial.cluster.down else len(invariants.lost_prompts(trial.cluster)),
        repeated=sum(times > 1 for times in recorder.trained_prompts.values()),
        violations=recorder.violations,
        hangs=int(stood),
        ended=int(bool(failure) and not stood),
        tokens=recorder.trained_tokens,
        made_again=recorder.wasted["made again"] + recorder.wasted["too late"],
        longest_s=trial.longest_s,
    )
    return Outcome(seed, kind_of(seed, kinds), figures, trial.happened, time.process_time() - began, failure)


@dataclass(slots=True)
class Total:
    all: Figures = field(default_factory=Figures)
    by_kind: dict[str, Figures] = field(default_factory=dict[str, Figures])
    """Of runs with faults of one kind, and of those with all kinds."""
    mixed: Counter[str] = field(default_factory=Counter[str])
    """Faults in mixed runs."""
    failures: list[Outcome] = field(default_factory=list[Outcome])
    cpu_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.all.add(outcome.figures)
        self.by_kind.setdefault(outcome.kind, Figures()).add(outcome.figures)
        if outcome.kind == MIXED:
            self.mixed += outcome.happened
        if outcome.failure:
            self.failures.append(outcome)
        self.cpu_s += outcome.cpu_s

    def rows(self) -> dict[str, dict[str, Any]]:
        def row(figures: Figures, happened: int) -> dict[str, Any]:
            per_fault = figures.made_again / max(1, figures.faults)
            row = {name: getattr(figures, name) for name in figures.__slots__}
            return row | {"faults_in_mixed_runs": happened, "made_again_per_fault": round(per_fault, 1)}

        return {kind: row(figures, self.mixed[kind]) for kind, figures in sorted(self.by_kind.items())}


def table(total: Total) -> str:
    heads = ("faults", "alone", "mixed", "lost", "twice", "too late", "hangs", "ended", "tokens again", "longest s")
    lines = [f"{heads[0]:<26}" + "".join(f"{head:>13}" for head in heads[1:])]
    for kind, row in total.rows().items():
        keys = ("faults", "faults_in_mixed_runs", "lost", "repeated", "violations", "hangs", "ended")
        cells = [row[key] for key in keys]
        lines.append(
            f"{kind.replace('_', ' '):<26}"
            + "".join(f"{cell:>13,}" for cell in cells)
            + f"{row['made_again_per_fault']:>13,.1f}{row['longest_s']:>13,.0f}"
        )
    return "\n".join(lines)


# The command


def outcomes(first: int, kinds: tuple[str, ...], jobs: int) -> Iterator[Outcome]:
    """By seed, in order, without end: which runs are counted does not depend on ``jobs``."""
    seeds = ((seed, kinds) for seed in count(first))
    if jobs == 1:
        yield from (outcome_of(*each) for each in seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        while True:  # imap would take all seeds there are
            yield from pool.starmap(outcome_of, [next(seeds) for _ in range(16 * jobs)], chunksize=4)


def until(found: Iterable[Outcome], most: int, seconds: float) -> Total:
    """Add up outcomes until there are enough faults, or no time is left."""
    total, began = Total(), time.monotonic()
    for outcome in found:
        total.add(outcome)
        if total.all.faults >= most or time.monotonic() - began > seconds:
            break
    return total


def again(seed: int, kinds: tuple[str, ...]) -> None:
    trial = trial_of(seed, kinds)
    try:
        trial.run()
    finally:
        for event in trial.cluster.journal.events:
            if event[0] == FAULT:
                print(f"{event[1]:8.1f} s  {event[2]}")
        print(trial.cluster.journal.digest())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=amounts.whole, default=10_000, metavar="N", help="stop after N faults")
    parser.add_argument(
        "--seconds", type=amounts.amount, default=float("inf"), metavar="S", help="stop after S seconds"
    )
    parser.add_argument("--seed", type=amounts.whole, default=0, metavar="N", help="the first seed")
    parser.add_argument("--jobs", type=amounts.count, default=2, metavar="N", help="processes")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of faults, with commas")
    parser.add_argument("--json", type=kept.to_write, metavar="FILE", help="write the figures")
    parser.add_argument("--again", type=amounts.whole, metavar="SEED", help="one run again")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds {unknown[0]} is unknown: choose from {', '.join(KINDS)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} is impossible: give 1 or more")
    if options.again is not None:
        again(options.again, kinds)
        return 0
    began = time.monotonic()
    total = until(outcomes(options.seed, kinds, options.jobs), options.faults, options.seconds)
    wall_s, rate = time.monotonic() - began, total.all.faults / total.cpu_s
    given = f" --kinds {options.kinds}" if kinds != KINDS else ""
    commands = {each.seed: f"python bench/chaos_simulated.py{given} --again {each.seed}" for each in total.failures}
    print(table(total))
    print(f"{total.all.faults:,} faults in {total.all.runs:,} runs and {total.all.groups:,} groups: "
          f"{len(total.failures)} failures, {rate:.0f} faults per core-second, {wall_s:.0f} s")  # fmt: skip
    for each in total.failures:
        print(f"seed {each.seed}: {each.failure}\n    {commands[each.seed]}")
    if options.json:
        found = {
            "command": shlex.join(["python", *sys.argv]),
            "date": date.today().isoformat(),
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "total": {name: getattr(total.all, name) for name in total.all.__slots__},
            "wall_s": round(wall_s, 1),
            "cpu_s": round(total.cpu_s, 1),
            "faults_per_core_s": round(rate, 1),
            "by_kind": total.rows(),
            "failures": [
                {"seed": each.seed, "why": each.failure, "again": commands[each.seed]} for each in total.failures
            ],
        }
        kept.write(options.json, found)
    return 1 if total.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StaleFlowError as error:
        sys.exit(f"{error}")
