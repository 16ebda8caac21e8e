"""The evidence in ``docs/results/simulation.md``: every simulated figure, section by section.

    python bench/simulation.py --cache runs.jsonl                         # everything, on all cores: hours on two
    python bench/simulation.py --cache runs.jsonl --section ablation      # one section
    python bench/simulation.py --cache runs.jsonl --seconds 240           # stop after a while; continue later
    python bench/simulation.py --cache runs.jsonl --jobs 4                # on four cores
    python bench/simulation.py --quick                                    # small settings, minutes
    python bench/simulation.py --cache runs.jsonl --write                 # the document, from what is there

Each run goes to the cache as soon as it has ended and is never simulated again, so this can be stopped at any time.
A section is a list of units, whose runs go to one pool of processes; figures do not depend on ``--jobs``.
The cache knows nothing of the code: delete it when anything that decides has changed. With ``--json`` the sections are
printed as one object.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lanes import lanes
from simulation_lab import Case, Lab, OutOfTimeError, Runs, Scale, against, teller
from simulation_report import render
from simulation_summary import DOCUMENT, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts
from staleflow.config.machine import cores
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.lengths import Constant, Lognormal, PowerLaw
from staleflow.simulate.setting import R1, Setting, with_split, with_strategies
from staleflow.simulate.workload import Sampled
from staleflow.study.compare import TUNING_SEED, Row, key, run_row
from staleflow.study.law import balance, ceiling, even_ceiling, work_of
from staleflow.study.parallel import Run, Runner, Unit
from staleflow.study.peers import (
    SLOTS_WITH_EXCHANGE,
    SLOTS_WITHOUT_EXCHANGE,
    STALEFLOW,
    chunked,
    named,
)

PREDICTED = {"On two CPU cores": "simulator_error.json", "On one GPU (H200)": "simulator_error_gpu.json"}
"""What ``simulator_error.py --json`` has measured, beside the document."""

MAIN = "staleflow,synchronous,one_step,window_wait,discard,psrl_default,staleflow+batch"
"""The peers that keep the bound, and ours with and without streaming."""
ALL = "all,staleflow+batch,window_wait+stream"
FEW = "staleflow,synchronous,window_wait,psrl_default,staleflow+batch"
"""Where the others were never the best in similar settings, and take long."""
PAPER = ("paper-14b", "paper-32b", "paper-30b-a3b")
CELLS = {(name, variant): MAIN for variant in R1 for name in PAPER} | {
    ("paper-14b", "correlated"): ALL,
    ("paper-30b-a3b", "correlated"): f"{MAIN},window_wait+stream",
    ("paper-14b", "independent"): f"{MAIN},window_wait+stream",
    ("paper-14b", "long"): f"{MAIN},window_wait+stream",
    ("paper-32b", "long"): "staleflow,synchronous,one_step,window_wait,psrl_default",
    ("paper-30b-a3b", "long"): f"{FEW},one_step",
    ("paper-14b-128", "correlated"): FEW,
}
"""What is compared: preset and lengths, and the policies. A split is tuned for each of them."""

FULL = Scale(CELLS, bounds=(1, 2, 3), seeds=5, fewer_seeds=3, steps=20)
QUICK = Scale({("paper-14b", "correlated"): ALL}, bounds=(1, 2), seeds=2, fewer_seeds=2, steps=8, groups=32)
FEWER_BOUNDS = (1, 2)


# Sections: each returns plain data that simulation_report turns into tables.


def comparison(lab: Lab) -> Any:
    scale, seeds = lab.scale, range(1, lab.scale.seeds + 1)
    cells = {cell: scale.setting(*cell) for cell in scale.cells}
    compared = [lab.comparison(each, scale.cells[cell], scale.bounds, seeds) for cell, each in cells.items()]
    found = lab.rows(compared)
    return [
        {"preset": name, "lengths": variant, "rows": rows} for (name, variant), rows in zip(cells, found, strict=True)
    ]


def ceilings(lab: Lab) -> Any:
    """What is computed and not simulated, at bound 2."""
    found: list[Any] = []
    for name, variant in lab.scale.cells:
        setting = replace(lab.scale.setting(name, variant), staleness=2)
        work = work_of(setting)
        law = ceiling(setting, streamed=True, work=work)
        found.append(
            {
                "preset": name,
                "lengths": variant,
                "law": law.tokens_per_s,
                "binds": law.binds,
                "even": even_ceiling(setting, True, work),
                "one_lane": lanes(setting, work, 1),
                "two_lanes": lanes(setting, work, 2),
            }
        )
    return found


SWITCHES: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "whole batches": {"consume": "batch"},
    "routing: fewest requests": {"routing": "least_loaded"},
    "routing: in turn": {"routing": "round_robin"},
    "pull: by gain": {"synchronisation": "gain"},
    "pull: only when starved": {"synchronisation": "starved"},
    "no levelling": {"migration": "blocked"},
    "no levelling, no migration": {"migration": "off"},
    "mu 0.3, fixed": {"adapt": False},
    "mu 0.1, fixed": {"adapt": False, "mu": 0.1},
    "mu 0.5, fixed": {"adapt": False, "mu": 0.5},
    "tail: replace": {"tail": "replace"},
    "tail: truncate": {"tail": "truncate"},
}
"""Everything that can be switched, one at a time."""


TUNING = (("paper-14b", "correlated"), ("paper-30b-a3b", "correlated"))
CONFIRMING = (("paper-32b", "correlated"), ("paper-14b", "independent"))


def ablation(lab: Lab, cells: Sequence[tuple[str, str]] = TUNING) -> Any:
    shown = cells[: 1 if lab.scale is QUICK else None]
    return lab.finish([_ablation(lab, name, variant) for name, variant in shown])


def _ablation(lab: Lab, name: str, variant: str) -> Unit[Any]:
    base = yield from lab.tuned(lab.scale.setting(name, variant))
    cases = [Case(label, with_strategies(base, **change)) for label, change in SWITCHES.items()]
    rows = yield from lab.variations(cases)
    return {"preset": name, "lengths": variant, "staleness": base.staleness, "rows": against(rows[0], rows)}


def chunks(lab: Lab) -> Any:
    return lab.finish([_chunks(lab, bound) for bound in FEWER_BOUNDS])


def _chunks(lab: Lab, bound: int) -> Unit[Any]:
    base = yield from lab.tuned(replace(lab.scale.setting("paper-14b", "independent"), staleness=bound))
    cases = [Case(str(size), base, chunked(size)) for size in (1, 2, 8, 32, 64, 128) if size <= base.groups]
    rows = yield from lab.variations([*cases, Case("whole batches", base, named("staleflow+batch"))])
    return {"staleness": bound, "rows": against(rows[0], rows)}


def ready(lab: Lab) -> Any:
    return lab.finish([_ready(lab, bound, consume) for bound in FEWER_BOUNDS for consume in ("batch", "stream")])


def _ready(lab: Lab, bound: int, consume: str) -> Unit[Any]:
    base = replace(lab.scale.setting("paper-14b"), staleness=bound)
    base = yield from lab.tuned(with_strategies(base, consume=consume))
    cases = [
        Case("exact", base),
        Case("slots, one exchange", base, SLOTS_WITH_EXCHANGE),
        Case("slots, no exchange", base, SLOTS_WITHOUT_EXCHANGE),
    ]
    rows = yield from lab.variations(cases)
    return {"staleness": bound, "consume": consume, "rows": against(rows[0], rows)}


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
        "tail: power law 1.5": lengths(output=PowerLaw(1_524 / 3, 1.5)),
        "between prompts: 0 %": lengths(between=0.0),
        "between prompts: 100 %": lengths(between=1.0),
        "pulls at 4 GB/s": replace(base, link_bandwidth=4e9),
        "rewards after 60 s": replace(base, reward_s=60.0),
        "instances 20 % apart": replace(base, speed_spread=0.2),
        "bound 0": replace(base, staleness=0),
        "bound 4": replace(base, staleness=4),
        "bound 8": replace(base, staleness=8),
    }
    shown = {name: _starved(changes[name]) for name in list(changes)[: 4 if lab.scale is QUICK else None]}
    policies = "staleflow,window_wait,psrl_default"
    settings = shown.values()
    found = lab.rows([lab.comparison(each, policies, [each.staleness], lab.fewer, tune=False) for each in settings])
    return [
        {"name": name, "staleness": setting.staleness, "rows": rows}
        for (name, setting), rows in zip(shown.items(), found, strict=True)
    ]


def _starved(setting: Setting) -> Setting:
    """With somewhat fewer training GPUs than would keep up with the fleet if nothing waited."""
    setting = with_split(setting, balance(setting, work_of(setting)).training_gpus)
    return with_split(setting, max(1, round(0.85 * setting.training_gpus)))


def loses(lab: Lab) -> Any:
    """Equally long responses on four GPUs, of which an instance needs two: what is split cannot be shared."""
    base = lab.scale.setting("paper-32b")
    short = replace(base.workload, source=Sampled(Constant(1_000)))
    setting = replace(base, name="4 GPUs, constant lengths", workload=short, instances=1, training_gpus=2, groups=16)
    (rows,) = lab.rows([lab.comparison(setting, "staleflow,synchronous,one_step,window_wait", (1, 2), lab.fewer)])
    return {"rows": rows}


def killed(lab: Lab) -> Any:
    """One of the instances dies in the middle of the run and stays dead."""
    return lab.finish([_killed(lab)])[0]


def _killed(lab: Lab) -> Unit[Any]:
    base = yield from lab.tuned(lab.scale.setting("paper-14b"))
    wanted = [
        Run("killed " + key(STALEFLOW, base, seed), f"one dies, seed {seed}", _with_a_death, (base, seed))
        for seed in lab.fewer
    ]
    yield wanted
    rows = yield from lab.variations([Case("nothing happens", base), Case("one fewer from the start", _fewer(base))])
    rows.append(lab.line(Case("one dies at half time", base), wanted))
    deaths = [lab.runner.runs[run.name] for run in wanted]
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
    return run_row(cluster, time.perf_counter() - began)


def defaults(lab: Lab) -> Any:
    """Chosen on one set of workloads and seeds, confirmed on another that was not used for choosing."""
    found: dict[str, Any] = {}
    for name, cells in (("chosen on", TUNING), ("confirmed on", CONFIRMING)):
        parts = ablation(lab, cells)
        ratios = {label: [each["ratio"] for part in parts for each in part["rows"] if each["name"] == label]
                  for label in SWITCHES}  # fmt: skip
        found[name] = {
            "workloads": sorted({f"{part['preset']} {part['lengths']}" for part in parts}),
            "rows": [{"name": label, "ratio": fmean(each), "worst": min(each)} for label, each in ratios.items()],
        }
    return found


def predicted(lab: Lab) -> Any:  # noqa: ARG001  # nothing is simulated here
    """The simulator against real runs, as ``simulator_error.py`` has left it."""
    paths = {where: DOCUMENT.parent / name for where, name in PREDICTED.items()}
    return {where: json.loads(path.read_text()) for where, path in paths.items() if path.exists()}


SECTIONS: dict[str, Callable[[Lab], Any]] = {
    "comparison": comparison,
    "ceilings": ceilings,
    "ablation": ablation,
    "chunks": chunks,
    "ready": ready,
    "sensitivity": sensitivity,
    "loses": loses,
    "killed": killed,
    "defaults": defaults,
    "predicted": predicted,
}


def simulate(lab: Lab, sections: Sequence[str]) -> dict[str, Any]:
    """As many of the sections as there is time for."""
    results: dict[str, Any] = {}
    for name in sections:
        print(name, file=sys.stderr, flush=True)
        try:
            results[name] = SECTIONS[name](lab)
        except OutOfTimeError:
            print(f"{name} is not done: run it again with the same --cache to continue", file=sys.stderr)
            break
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate the evidence from simulations.", allow_abbrev=False)
    parser.add_argument("--section", choices=[*SECTIONS], action="append", help="only this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="small settings and few seeds, in minutes")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="where runs are kept and looked up")
    parser.add_argument("--seconds", type=amounts.amount, default=float("inf"), metavar="S", help="stop after so long")
    parser.add_argument(
        "--jobs", type=amounts.count, default=cores(), metavar="N", help="processes (default: one for each core)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the document")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} is impossible; give 1 or more")
    scale = QUICK if options.quick else FULL
    runs = Runs(options.cache)
    tell = teller(time.monotonic() + options.seconds)
    try:
        with Runner(runs, options.jobs, tell) as runner:
            results = simulate(Lab(scale, runner), options.section or [*SECTIONS])
    except KeyboardInterrupt:
        print("interrupted: run it again with the same --cache to continue", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(results, allow_nan=False))
    elif options.write and (missing := [name for name in SECTIONS if not results.get(name)]):
        print(f"{DOCUMENT.name} is left as it is: there is no {', '.join(missing)}", file=sys.stderr)
        return 1
    else:
        text = render(results, (scale.seeds, scale.fewer_seeds), scale.steps, TUNING_SEED, options.quick)
        if options.write:
            write(text)
        else:
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
