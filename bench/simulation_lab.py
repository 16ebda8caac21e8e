"""How the experiments of ``simulation.py`` are run: runs that are kept, settings at a scale, and lines of tables."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from staleflow.simulate.setting import Setting, preset
from staleflow.study.compare import Comparison, Row, first_counted, half_width, ratio, run_of
from staleflow.study.parallel import Run, Runner, T, Unit
from staleflow.study.peers import STALEFLOW, Policy, chosen
from staleflow.study.result import speed


class OutOfTimeError(Exception):
    """The time limit is reached; what has been simulated is in the cache."""


class Runs(dict[str, Row]):
    """Runs by their keys, each appended to a file as it comes."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                name, run = json.loads(line)
                super().__setitem__(name, run)

    def __setitem__(self, name: str, run: Row) -> None:
        super().__setitem__(name, run)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, run]) + "\n")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated."""

    cells: Mapping[tuple[str, str], str]
    bounds: tuple[int, ...]
    seeds: int
    """Seeds of the comparison."""
    fewer_seeds: int
    """Seeds of everything else."""
    steps: int
    groups: int | None = None
    """A smaller batch, on fewer GPUs in proportion."""

    def setting(self, name: str, variant: str = "correlated") -> Setting:
        setting = preset(name, f"lengths={variant}", f"steps={self.steps}")
        if self.groups is None:
            return setting
        factor = setting.groups // self.groups
        return replace(
            setting,
            groups=self.groups,
            instances=max(2, setting.instances // factor),
            training_gpus=setting.training_gpus // factor,
        )


class Case(NamedTuple):
    """One line of a table."""

    name: str
    setting: Setting
    policy: Policy = STALEFLOW


@dataclass(slots=True)
class Lab:
    scale: Scale
    runner: Runner

    @property
    def fewer(self) -> range:
        return range(1, self.scale.fewer_seeds + 1)

    def finish(self, units: Sequence[Unit[T]]) -> list[T]:
        return self.runner.finish(units)

    def comparison(
        self, setting: Setting, policies: str, bounds: Sequence[int], seeds: Sequence[int], tune: bool = True
    ) -> Comparison:
        return Comparison(setting, chosen(policies), bounds, seeds, tune=tune, runs=self.runner.runs)

    def rows(self, comparisons: Sequence[Comparison]) -> list[list[Row]]:
        """The rows of each comparison; all of their runs are simulated together."""
        self.finish([unit for each in comparisons for unit in each.units()])
        return [each.rows() for each in comparisons]

    def tuned(self, setting: Setting) -> Unit[Setting]:
        """The setting with the split that serves ours best, as it is configured there."""
        found = Comparison(setting, [STALEFLOW], [setting.staleness], [], tune=True, runs=self.runner.runs)
        return found.tuning(STALEFLOW, setting.staleness)

    def variations(self, cases: Sequence[Case]) -> Unit[list[Row]]:
        """The lines of a table, each over all seeds."""
        wanted = [[self.run(case, seed) for seed in self.fewer] for case in cases]
        yield [run for runs in wanted for run in runs]
        return [self.line(case, runs) for case, runs in zip(cases, wanted, strict=True)]

    def run(self, case: Case, seed: int) -> Run:
        setting = case.policy.fit(case.setting)
        what = f"{case.policy.name}, {setting.name}, bound {setting.staleness}, seed {seed}"
        return run_of(case.policy, setting, seed, what)

    def line(self, case: Case, runs: Sequence[Run]) -> Row:
        found = [self.runner.runs[run.name] for run in runs]
        first = first_counted(case.setting.steps, case.setting.staleness)
        speeds = [speed(run["commits"], first) for run in found]
        return {
            "name": case.name,
            "speeds": speeds,
            "trained_tokens_per_s": fmean(speeds),
            "ci95": half_width(speeds),
            "rollout_gpus": found[0]["rollout_gpus"],
            "training_gpus": found[0]["training_gpus"],
            "violations": sum(run["violations"] for run in found),
            "mean_staleness": fmean(run["mean_staleness"] for run in found),
            "wasted_fraction": fmean(run["wasted_fraction"] for run in found),
            "length_shift": fmean(run["length_shift"] for run in found),
        }


def teller(until: float) -> Callable[[str], None]:
    """Shows what starts, as long as there is time for it."""

    def tell(what: str) -> None:
        if time.monotonic() > until:
            raise OutOfTimeError
        print(f"  {what}", file=sys.stderr, flush=True)

    return tell


def against(first: Row, rows: list[Row]) -> list[Row]:
    """Each row with its ratio to the first, seed by seed."""
    return [each | {"ratio": ratio(each["speeds"], first["speeds"])} for each in rows]
