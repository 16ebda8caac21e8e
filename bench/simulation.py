"""The evidence in ``docs/results/simulation.md``: every simulated figure, section by section.

    python bench/simulation.py --cache runs.jsonl                         # everything; hours on one core
    python bench/simulation.py --cache runs.jsonl --section ablation      # one section
    python bench/simulation.py --cache runs.jsonl --seconds 240           # stop after a while; go on later
    python bench/simulation.py --quick                                    # small settings, minutes
    python bench/simulation.py --cache runs.jsonl --write                 # the document, from what is there

Each run goes to the cache as soon as it has ended and is never simulated again, so this can be stopped at any time.
The cache knows nothing of the code: delete it when anything that decides has changed. With ``--json`` the sections are
printed as one object.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from simulation_report import render

from staleflow.simulate.cluster import Cluster
from staleflow.simulate.compare import (
    TUNING_SEED,
    Comparison,
    Row,
    first_counted,
    half_width,
    key,
    measured,
    ratio,
    simulated,
    speed,
)
from staleflow.simulate.limits import balance, work_of
from staleflow.simulate.peers import (
    SLOTS_WITH_EXCHANGE,
    SLOTS_WITHOUT_EXCHANGE,
    STALEFLOW,
    Policy,
    chosen,
    chunked,
    named,
)
from staleflow.simulate.presets import PRESETS, VARIANTS, Setting, preset, with_lengths, with_split, with_strategies
from staleflow.simulate.workload import Constant, Lognormal, PowerLaw, Sampled

DOCUMENT = Path(__file__).parent.parent / "docs" / "results" / "simulation.md"
COMPARED = "all,staleflow+batch,one_step+stream,window_wait+stream,discard+stream,psrl_default+stream"
BOUNDS = (1, 2, 3)


class OutOfTimeError(Exception):
    """The time that was given is over; what has been simulated is in the cache."""


class Runs(dict[str, Row]):
    """Runs by their keys, each appended to a file as it comes."""

    def __init__(self, path: Path | None, until: float) -> None:
        super().__init__()
        self._path, self._until = path, until
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                name, run = json.loads(line)
                super().__setitem__(name, run)

    def __setitem__(self, name: str, run: Row) -> None:
        super().__setitem__(name, run)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, run]) + "\n")
        if time.monotonic() > self._until:
            raise OutOfTimeError


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated."""

    presets: tuple[str, ...]
    variants: tuple[str, ...]
    bounds: tuple[int, ...]
    seeds: int
    steps: int
    groups: int | None = None
    """A smaller batch, on as many times fewer GPUs."""

    def setting(self, name: str, variant: str = "correlated") -> Setting:
        setting = replace(with_lengths(preset(name), variant), steps=self.steps)
        if self.groups is None:
            return setting
        factor = setting.groups // self.groups
        return replace(
            setting,
            groups=self.groups,
            instances=max(2, setting.instances // factor),
            training_gpus=setting.training_gpus // factor,
        )


FULL = Scale(tuple(PRESETS), tuple(VARIANTS), BOUNDS, seeds=5, steps=20)
QUICK = Scale(("paper-14b",), ("correlated",), (1, 2), seeds=2, steps=8, groups=32)


@dataclass(slots=True)
class Lab:
    scale: Scale
    runs: MutableMapping[str, Row]
    splits: dict[str, Setting] = field(default_factory=dict[str, Setting])

    def comparison(self, setting: Setting, policies: str, bounds: tuple[int, ...], tune: bool = True) -> list[Row]:
        seeds = range(1, self.scale.seeds + 1)
        return Comparison(setting, chosen(policies), bounds, seeds, tune=tune, on_run=_tell, runs=self.runs).rows()

    def tuned(self, setting: Setting) -> Setting:
        """The setting with the split that serves ours best, as it is configured there."""
        found = Comparison(setting, [STALEFLOW], [setting.staleness], [], tune=True, on_run=_tell, runs=self.runs)
        return found.split(STALEFLOW, setting.staleness)

    def variation(self, name: str, setting: Setting, policy: Policy = STALEFLOW) -> Row:
        """One line of a table: a setting, over all seeds."""
        found = [self.run(policy, policy.fit(setting), seed) for seed in range(1, self.scale.seeds + 1)]
        return self.line(name, setting, found)

    def line(self, name: str, setting: Setting, found: list[Row]) -> Row:
        speeds = [speed(run, first_counted(setting.steps, setting.staleness)) for run in found]
        return {
            "name": name,
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

    def run(self, policy: Policy, setting: Setting, seed: int) -> Row:
        name = key(policy, setting, seed)
        if name not in self.runs:
            _tell(f"{policy.name}, {setting.name}, bound {setting.staleness}, seed {seed}")
            self.runs[name] = simulated(policy, setting, seed)
        return self.runs[name]


def _tell(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def against(first: Row, rows: list[Row]) -> list[Row]:
    """Each row with its ratio to the first, seed by seed."""
    return [each | {"ratio": ratio(each["speeds"], first["speeds"])} for each in rows]


# Sections: each returns plain data that simulation_report turns into tables.


def comparison(lab: Lab) -> Any:
    cells = [(name, variant) for name in lab.scale.presets for variant in lab.scale.variants]
    return [
        {"preset": name, "lengths": variant, "rows": lab.comparison(setting, COMPARED, lab.scale.bounds)}
        for name, variant in cells
        for setting in [lab.scale.setting(name, variant)]
    ]


SWITCHES: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "whole batches": {"consume": "batch"},
    "routing: fewest requests": {"routing": "least_loaded"},
    "routing: in turn": {"routing": "round_robin"},
    "pull: by gain": {"synchronisation": "gain"},
    "pull: only when starved": {"synchronisation": "starved"},
    "no migration": {"migration": "off"},
    "mu 0.1, not derived": {"adapt": False, "mu": 0.1},
    "mu 0.3, not derived": {"adapt": False, "mu": 0.3},
    "mu 0.5, not derived": {"adapt": False, "mu": 0.5},
    "tail: replace": {"tail": "replace"},
    "tail: truncate": {"tail": "truncate"},
}
"""Everything that can be switched, one at a time."""


def ablation(lab: Lab, names: tuple[tuple[str, str], ...] | None = None) -> Any:
    cells = names or (("paper-14b", "correlated"), ("paper-30b-a3b", "correlated"), ("paper-14b", "long"))
    found: list[Any] = []
    for name, variant in cells[: 1 if lab.scale is QUICK else None]:
        for bound in lab.scale.bounds:
            base = lab.tuned(replace(lab.scale.setting(name, variant), staleness=bound))
            rows = [lab.variation(label, with_strategies(base, **change)) for label, change in SWITCHES.items()]
            found.append({"preset": name, "lengths": variant, "staleness": bound, "rows": against(rows[0], rows)})
    return found


def chunks(lab: Lab) -> Any:
    found: list[Any] = []
    for bound in lab.scale.bounds:
        base = lab.tuned(replace(lab.scale.setting("paper-14b", "independent"), staleness=bound))
        sizes = [size for size in (1, 2, 8, 32, 64, 128) if size <= base.groups]
        rows = [lab.variation(str(size), base, chunked(size)) for size in sizes]
        rows.append(lab.variation("whole batches", base, named("staleflow+batch")))
        found.append({"staleness": bound, "rows": against(rows[0], rows)})
    return found


def ready(lab: Lab) -> Any:
    found: list[Any] = []
    for bound in lab.scale.bounds:
        for consume in ("batch", "stream"):
            base = replace(lab.scale.setting("paper-14b"), staleness=bound)
            base = lab.tuned(with_strategies(base, consume=consume))
            rows = [
                lab.variation("exact", base),
                lab.variation("slots, one exchange", base, SLOTS_WITH_EXCHANGE),
                lab.variation("slots, no exchange", base, SLOTS_WITHOUT_EXCHANGE),
            ]
            found.append({"staleness": bound, "consume": consume, "rows": against(rows[0], rows)})
    return found


def sensitivity(lab: Lab) -> Any:
    """Ours and the best bounded peer, as one thing changes at a time."""
    base = lab.scale.setting("paper-14b")
    source = base.workload.source
    assert isinstance(source, Sampled)

    def lengths(**change: Any) -> Setting:
        return replace(base, workload=replace(base.workload, source=replace(source, **change)))

    changes: dict[str, Setting] = {
        "as the preset": base,
        "tail: none (constant)": lengths(output=Constant(1_524)),
        "tail: lognormal, CV 1": lengths(output=Lognormal.from_mean(1_524, 1.0)),
        "tail: lognormal, CV 2": lengths(output=Lognormal.from_mean(1_524, 2.0)),
        "tail: power law 1.5": lengths(output=PowerLaw(1_524 / 3, 1.5)),
        "between prompts: 0 %": lengths(between=0.0),
        "between prompts: 35 %": lengths(between=0.35),
        "between prompts: 100 %": lengths(between=1.0),
        "pulls at 4 GB/s": replace(base, link_bandwidth=4e9),
        "pulls at 40 GB/s together": replace(base, total_bandwidth=40e9),
        "rewards after 10 s": replace(base, reward_s=10.0),
        "rewards after 60 s": replace(base, reward_s=60.0),
        "instances 20 % apart": replace(base, speed_spread=0.2),
        "bound 0": replace(base, staleness=0),
        "bound 1": replace(base, staleness=1),
        "bound 4": replace(base, staleness=4),
        "bound 8": replace(base, staleness=8),
    }
    found: list[Any] = []
    for name, setting in list(changes.items())[: 4 if lab.scale is QUICK else None]:
        setting = with_split(setting, balance(setting, work_of(setting)).training_gpus)
        setting = with_split(setting, max(1, round(0.85 * setting.training_gpus)))
        rows = lab.comparison(
            setting, "staleflow,staleflow+batch,window_wait,psrl_default", (setting.staleness,), False
        )
        found.append({"name": name, "staleness": setting.staleness, "rows": rows})
    return found


def loses(lab: Lab) -> Any:
    """Equally long replies on four GPUs, of which an instance needs two: what is split cannot be shared."""
    base = lab.scale.setting("paper-32b")
    short = replace(base.workload, source=Sampled(Constant(1_000)))
    setting = replace(base, name="4 GPUs, constant lengths", workload=short, instances=1, training_gpus=2, groups=16)
    return {"rows": lab.comparison(setting, "staleflow,synchronous,one_step,window_wait", (1, 2), tune=True)}


def killed(lab: Lab) -> Any:
    """One of the instances dies in the middle of the run and stays dead."""
    base = lab.tuned(lab.scale.setting("paper-14b"))
    deaths: list[Row] = []
    for seed in range(1, lab.scale.seeds + 1):
        name = "killed " + key(STALEFLOW, base, seed)
        if name not in lab.runs:
            lab.runs[name] = _with_a_death(base, seed)
        deaths.append(lab.runs[name])
    rows = [
        lab.variation("nothing happens", base),
        lab.variation("one fewer from the start", _fewer(base)),
        lab.line("one dies at half time", base, deaths),
    ]
    return {"rows": against(rows[0], rows), "made_again": fmean(run["wasted"].get("made again", 0) for run in deaths)}


def _fewer(setting: Setting) -> Setting:
    return replace(setting, instances=setting.instances - 1)


def _with_a_death(setting: Setting, seed: int) -> Row:
    began = time.perf_counter()
    cluster = Cluster(setting, seed)
    quiet = Cluster(setting, seed)
    quiet.run()
    half = quiet.loop.time() / 2
    cluster.on_start.append(lambda: cluster.loop.call_later(half, cluster.rollouts[0].crash) and None)
    cluster.run()
    return measured(cluster, time.perf_counter() - began)


def defaults(lab: Lab) -> Any:
    """Chosen on one set of workloads and seeds, confirmed on another that was not used for choosing."""
    tuning = (("paper-14b", "correlated"), ("paper-30b-a3b", "correlated"), ("paper-14b", "long"))
    confirming = (("paper-32b", "correlated"), ("paper-14b-128", "independent"), ("paper-30b-a3b", "long"))
    found: dict[str, Any] = {}
    for name, cells in (("chosen on", tuning), ("confirmed on", confirming)):
        parts = ablation(lab, cells)
        ratios = {label: [each["ratio"] for part in parts for each in part["rows"] if each["name"] == label]
                  for label in SWITCHES}  # fmt: skip
        found[name] = {
            "workloads": sorted({f"{part['preset']} {part['lengths']}" for part in parts}),
            "rows": [{"name": label, "ratio": fmean(each), "worst": min(each)} for label, each in ratios.items()],
        }
    return found


SECTIONS: dict[str, Callable[[Lab], Any]] = {
    "comparison": comparison,
    "ablation": ablation,
    "chunks": chunks,
    "ready": ready,
    "sensitivity": sensitivity,
    "loses": loses,
    "killed": killed,
    "defaults": defaults,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate the evidence from simulations.", allow_abbrev=False)
    parser.add_argument("--section", choices=[*SECTIONS], action="append", help="only this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="small settings and few seeds, in minutes")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="where runs are kept and looked up")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="stop after so long")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the document")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    lab = Lab(scale, Runs(options.cache, time.monotonic() + options.seconds))
    results: dict[str, Any] = {}
    for name in options.section or SECTIONS:
        print(name, file=sys.stderr, flush=True)
        try:
            results[name] = SECTIONS[name](lab)
        except OutOfTimeError:
            print(f"{name} is not done: run it again with the same --cache to go on", file=sys.stderr)
            break
    if options.json:
        print(json.dumps(results, allow_nan=False))
    else:
        text = render(results, scale.seeds, scale.steps, TUNING_SEED, options.quick)
        if options.write:
            DOCUMENT.write_text(text)
        else:
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
