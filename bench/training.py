"""What staleness does to learning, and what asynchrony does to time, on the embedded task. Writes docs/results.

    python bench/training.py                                       # all of it: about half an hour on two quiet cores
    python bench/training.py --trl /tmp/trl-venv/bin/python        # and TRL's GRPOTrainer in between
    python bench/training.py --quick                               # one seed, few steps: whether it runs
    python bench/training.py --json

Every run is ``staleflow train`` with the ``laptop`` preset, one after the other on an otherwise idle machine, and the
settings that are compared take turns within each seed. Held-out accuracy (greedy) of every version is
measured after the run has ended (``evaluation.when=after``), so that measuring does not slow down what is measured.
Finished runs are kept in ``--results`` and not made again, so that an interrupted bench can continue.

*Time to 90 %* is the time at which the first version with at least 90 % was made. *The limit* is what total CPU work
allows: with R and T the CPU seconds of rollout and training per step, a synchronous step takes at least R / 2 + T (two
instances, then one trainer) and an asynchronous one (R + T) / 2 on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import amounts, kept  # noqa: E402
from staleflow.observe.chart import HEIGHT, Curve, chart, stacked  # noqa: E402
from staleflow.observe.chart import document as svg  # noqa: E402

T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t for a two-sided 95 % interval, by degrees of freedom."""
GOAL = 0.9
PROBLEMS = 384
"""Held-out problems that each version is scored on."""
MOST_S = 900
"""Time limit of one run."""


class Setting(NamedTuple):
    bound: int
    correction: str = "none"
    consume: str = "stream"

    @property
    def name(self) -> str:
        what = f"bound {self.bound}"
        if self.consume == "batch":
            what += ", whole batches"
        return what if self.correction == "none" else f"{what}, {self.correction}"

    def overrides(self) -> list[str]:
        return [
            f"staleness={self.bound}",
            f"training.correction={self.correction}",
            f"strategies.consume={self.consume}",
        ]


SYNCHRONOUS = Setting(0, consume="batch")
TRL = "TRL"
DEFAULT = "default"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=amounts.count, default=3)
    parser.add_argument("--steps", type=amounts.count, default=24)
    parser.add_argument(
        "--default-seeds", type=amounts.whole, default=5, help="runs of the command as it comes, base model and all"
    )
    parser.add_argument("--bounds", type=amounts.wholes, default="0,1,2,3,8")
    parser.add_argument("--corrections", default="none,truncated")
    parser.add_argument("--trl", metavar="PYTHON", help="a Python that has trl: its GRPOTrainer takes its turn too")
    parser.add_argument(
        "--results", type=kept.to_continue, default=str(Path(tempfile.gettempdir()) / "staleflow-training.json")
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write training.md and training.svg there")
    parser.add_argument("--quick", action="store_true", help="one seed, bounds 0 and 2, 6 steps")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.bounds, options.corrections = 1, 6, [0, 2], "none"
        options.default_seeds = 1
    settings = [SYNCHRONOUS]
    for correction in options.corrections.split(","):
        settings += [Setting(bound, correction) for bound in options.bounds]
    results = Results(options.results, options.steps)
    for seed in range(options.seeds):
        for setting in settings:
            results.make(setting.name, seed, lambda setting=setting, seed=seed: ours(setting, seed, options.steps))
        if options.trl:
            results.make(TRL, seed, lambda seed=seed: theirs(options.trl, seed, options.steps))
    for seed in range(options.default_seeds):
        results.make(DEFAULT, seed, lambda seed=seed: as_it_comes(seed))
    defaults = results.all(options.default_seeds, [DEFAULT])[DEFAULT]
    table = summed_up(results.all(options.seeds, [each.name for each in settings] + [TRL] * bool(options.trl)))
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "training.md").write_text(document(table, defaults, options))
        (options.write / "training.svg").write_text(picture(table))
    print(json.dumps(table | {DEFAULT: defaults}) if options.json else document(table, defaults, options))
    return 0


# Runs


class Results:
    """Finished runs by setting, seed and steps; each is written down as soon as it has ended."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        self._steps = steps
        self._runs: dict[str, Any] = kept.read(path)

    def make(self, name: str, seed: int, run: Any) -> None:
        key = f"{name} | {seed} | {self._steps}"
        if key in self._runs:
            return
        print(f"{name}, seed {seed} ...", file=sys.stderr, flush=True)
        self._runs[key] = run()
        kept.write(self._path, self._runs)

    def all(self, seeds: int, names: Sequence[str]) -> dict[str, list[Any]]:
        return {name: [self._runs[f"{name} | {seed} | {self._steps}"] for seed in range(seeds)] for name in names}


def ours(setting: Setting, seed: int, steps: int) -> dict[str, Any]:
    every = 1 if setting.correction == "none" else 2
    words = [f"seed={seed}", f"steps={steps}", f"evaluation.every={every}", "evaluation.when=after"]
    summary = trained([*words, f"evaluation.problems={PROBLEMS}", *setting.overrides()])
    cpu = summary["cpu_s"]
    return {
        "curve": [(each["step"], each["seconds"], each["accuracy"]) for each in summary["accuracy"]],
        "seconds": summary["wall_s"],
        "seconds_to_90": summary["seconds_to_90"],
        "samples": summary["trajectories_trained"],
        "token_staleness": summary["staleness_histogram"],
        "trajectory_staleness": summary["trajectory_staleness_histogram"],
        "wasted": summary["tokens_wasted"] / max(1, summary["tokens_trained"]),
        "trainer_idle": summary["trainer_idle"],
        "control_overhead": summary["control_overhead"],
        "violations": summary["violations"],
        "rollout_cpu_s": sum(cpu[name] for name in cpu if name.startswith("i")) / steps,
        "trainer_cpu_s": cpu["trainer"] / steps,
        "cpu_s": (sum(cpu.values()) + summary["control_overhead"] * summary["wall_s"]) / steps,
    }


def as_it_comes(seed: int) -> dict[str, Any]:
    """``staleflow train`` as a user runs it, with a cache that has no base model yet."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.monotonic()
        summary = trained([f"seed={seed}", f"cache={cache}"])
        return summary | {"command_s": time.monotonic() - began}


def trained(words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-c", "from staleflow.cli import main; raise SystemExit(main())", "train", "--json"]
        done = subprocess.run(
            [*command, f"runs={runs}", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=MOST_S,
        )
    return json.loads(done.stdout)


def theirs(python: str, seed: int, steps: int) -> dict[str, Any]:
    command = [python, "bench/trl_baseline.py", "--json", "--seed", str(seed), "--steps", str(steps)]
    command += ["--eval-problems", str(PROBLEMS)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=MOST_S
    )
    made = json.loads(done.stdout)
    curve = [
        (each["step"], each["seconds"], each["accuracy"]) for each in made["steps"] if each["accuracy"] is not None
    ]
    return {
        "curve": curve,
        "seconds": made["steps"][-1]["seconds"],
        "seconds_to_90": made["seconds_to_90"],
        "samples": made["steps"][-1]["samples"],
        "cpu_s": made["cpu_seconds_per_step"],
    }


# Statistics


def summed_up(runs: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: _row(found) for name, found in runs.items()}


def _row(runs: list[Any]) -> dict[str, Any]:
    steps = sorted({step for run in runs for step, _, _ in run["curve"]})
    curves = [{step: accuracy for step, _, accuracy in run["curve"]} for run in runs]
    times = [{step: seconds for step, seconds, _ in run["curve"]} for run in runs]
    by_step = {
        step: interval([curve[step] for curve in curves]) for step in steps if all(step in curve for curve in curves)
    }
    row: dict[str, Any] = {
        "seeds": len(runs),
        "accuracy": by_step,
        "seconds": {step: statistics.median(time[step] for time in times) for step in by_step},
        "step_s": statistics.median(run["seconds"] / max(run["curve"])[0] for run in runs),
        "samples_per_s": statistics.median(run["samples"] / run["seconds"] for run in runs),
        "seconds_to_90": [run["seconds_to_90"] for run in runs],
        "steps_to_90": [next((step for step, _, got in run["curve"] if got >= GOAL), None) for run in runs],
        "cpu_s": statistics.median(run["cpu_s"] for run in runs),
    }
    if "token_staleness" in runs[0]:
        row |= {key: _histogram(run[key] for run in runs) for key in ("token_staleness", "trajectory_staleness")}
        for key in ("wasted", "trainer_idle", "control_overhead", "rollout_cpu_s", "trainer_cpu_s"):
            row[key] = statistics.median(run[key] for run in runs)
        row["violations"] = sum(run["violations"] for run in runs)
    return row


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.mean(values), T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def _histogram(parts: Iterable[dict[str, int]]) -> dict[str, float]:
    total: dict[str, int] = {}
    for part in parts:
        for age, count in part.items():
            total[age] = total.get(age, 0) + count
    whole = max(1, sum(total.values()))
    return {age: total[age] / whole for age in sorted(total, key=int)}


def ratio_to(row: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Ratios of the times to 90 %, seed by seed."""
    pairs = zip(row["seconds_to_90"], other["seconds_to_90"], strict=True)
    return [mine / its for mine, its in pairs if mine is not None and its is not None]


# What people read


def document(table: dict[str, Any], defaults: list[dict[str, Any]], options: argparse.Namespace) -> str:
    marks = [step for step in (4, 8, 12, 16, 20, 24, 30, 40, 60) if step <= options.steps]
    parts = [
        "# Training with stale data: what it costs, what it brings",
        f"Written by `bench/training.py`: {options.seeds} seeds, {options.steps} steps of 32 groups of 8, two "
        f"instances and one trainer on {os.cpu_count()} cores ({platform.machine()}). Accuracy is held-out, "
        f"{PROBLEMS} problems, greedy; ± is a 95 % interval over seeds. Every setting has taken its turn in each "
        "seed, on the same machine.",
        "## Accuracy against steps",
        _table(
            ["setting", *(f"step {step}" for step in marks), "steps to 90 %"],
            [
                [name, *(_accuracy(row, step) for step in marks), _each(row["steps_to_90"], "d")]
                for name, row in table.items()
            ],
        ),
        _verdict(table, options.steps),
        "## Time",
        _table(
            ["setting", "s/step", "samples/s", "time to 90 % (s), by seed", "CPU s/step", "trainer idle", "control"],
            [
                [
                    name,
                    f"{row['step_s']:.2f}",
                    f"{row['samples_per_s']:.0f}",
                    _each(row["seconds_to_90"], ".1f"),
                    f"{row['cpu_s']:.2f}",
                    f"{row['trainer_idle']:.0%}" if "trainer_idle" in row else "",
                    f"{row['control_overhead']:.1%}" if "control_overhead" in row else "",
                ]
                for name, row in table.items()
            ],
        ),
        _times(table),
        "*Whole batches* is the synchronous loop: generate all, then train. With bound 0 the others stream: gradients "
        "of complete groups are computed while the last responses are generated, which overlaps a part of the work "
        "without any staleness. Time to 90 % is a first crossing, so a step more or less is luck; time per step is "
        "steadier. Where other work ran on the machine, seconds say less than CPU seconds.",
        "![accuracy against steps and time](training.svg)",
        "## Staleness of what was trained",
        _table(
            ["setting", "by token", "by trajectory (its oldest token)", "beyond the bound", "tokens wasted"],
            [
                [name, _ages(row["token_staleness"]), _ages(row["trajectory_staleness"]), str(row["violations"]),
                 f"{row['wasted']:.1%}"]
                for name, row in table.items()
                if "token_staleness" in row
            ],
        ),
        "## The command as it comes",
        "`staleflow train` without arguments, with an empty cache: the base model is made first. Evaluated during the "
        "run, with 512 problems every 5 steps.",
        _table(
            ["seed", "before", "after", "steps", "training (s)", "90 % after (s)", "whole command (s)", "control"],
            [
                [str(seed), f"{run['accuracy_initial']:.3f}", f"{run['accuracy_final']:.3f}", str(run["steps"]),
                 f"{run['wall_s']:.0f}", _each([run["seconds_to_90"]], ".0f"), f"{run['command_s']:.0f}",
                 f"{run['control_overhead']:.1%}"]
                for seed, run in enumerate(defaults)
            ],
        ),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _verdict(table: dict[str, Any], steps: int) -> str:
    """Whether each bound is within the interval of bound 0 after the same number of steps."""
    base = table.get("bound 0")
    if base is None or steps not in base["accuracy"]:
        return ""
    mean, half = base["accuracy"][steps]
    said = []
    for name, row in table.items():
        if name.startswith("bound") and name != "bound 0" and steps in row["accuracy"]:
            got = row["accuracy"][steps][0]
            where = "within" if abs(got - mean) <= half else "above" if got > mean else "below"
            said.append(f"{name}: {got:.3f}, {where}")
    return f"Bound 0 after {steps} steps: {mean:.3f} ± {half:.3f}. Against that interval: " + "; ".join(said) + "."


def _times(table: dict[str, Any]) -> str:
    said: list[str] = []
    two = table.get("bound 2")
    for name in ("bound 0", SYNCHRONOUS.name, TRL):
        if two is None or name not in table:
            continue
        ratios = ratio_to(two, table[name])
        pace = two["step_s"] / table[name]["step_s"]
        if ratios:
            middle = statistics.median(ratios)
            said.append(f"to **{name}**: {middle:.2f}x the time to 90 % ({_each(ratios, '.2f')}), {pace:.2f}x per step")
    if two is not None and (base := table.get(SYNCHRONOUS.name)) is not None:
        rollout, training = base["rollout_cpu_s"], base["trainer_cpu_s"]
        limit = (rollout + training) / 2 / (rollout / 2 + training)
        said.append(
            f"the limit of total CPU work: {limit:.2f}x per step (rollout {rollout:.2f} and training {training:.2f} "
            "CPU seconds a step, measured with whole batches)"
        )
    return "Bound 2, compared: " + "; ".join(said) + "." if said else ""


def picture(table: dict[str, Any]) -> str:
    shown = {name: row for name, row in table.items() if "truncated" not in name}
    by_step = [
        Curve(name, [(step, 100 * mean, 100 * half) for step, (mean, half) in row["accuracy"].items()])
        for name, row in shown.items()
    ]
    by_time = [
        Curve(name, [(row["seconds"][step], 100 * mean, 0.0) for step, (mean, _) in row["accuracy"].items()])
        for name, row in shown.items()
    ]
    parts = [
        (chart(by_step, "held-out accuracy (%) against steps", "steps"), HEIGHT),
        (chart(by_time, "held-out accuracy (%) against time", "seconds"), HEIGHT),
    ]
    return svg(stacked(parts), 2 * HEIGHT, "held-out accuracy by staleness bound")


def _accuracy(row: dict[str, Any], step: int) -> str:
    if step not in row["accuracy"]:
        return ""
    mean, half = row["accuracy"][step]
    return f"{mean:.3f} ± {half:.3f}" if half else f"{mean:.3f}"


def _each(values: Iterable[float | None], form: str) -> str:
    return ", ".join("-" if value is None else format(value, form) for value in values)


def _ages(shares: dict[str, float]) -> str:
    return ", ".join(f"{age}: {share:.0%}" for age, share in shares.items())


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
