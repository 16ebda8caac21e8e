"""How far the simulator is from real runs: it is calibrated with one run of the laptop preset, and predicts others.

    python bench/simulator_error.py                                          # ten runs of 30 steps: five minutes
    python bench/simulator_error.py --json > docs/results/simulator_error.json
    python bench/simulator_error.py --runs DIR                               # runs that are there are not made again
    python bench/simulator_error.py --section docs/results/simulator_error.json   # the tables, from the file

Every run is ``staleflow train`` with the ``laptop`` preset and no evaluation in between, one after the other. The run
with bound 2 and the first seed is the calibration: from it alone come lengths, which groups teach anything, and what
steps, training, pulls, reports and rewards cost. Predicted are its own rows (how well the model fits) and those of all
other runs (how well it predicts). On both sides the first quarter of the steps is left out, or bound + 1 of them.

Two instances and a trainer share two cores, and how they do depends on who has work. So costs are CPU seconds, and the
simulator divides the cores as the calibration run did (``bench/shared_cores.py``). *Fixed shares* is the
prediction without that: everything costs the seconds that it took in the calibration run.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import amounts  # noqa: E402
from bench.shared_cores import SharedCluster, Shares, Sharing, alone, calibrated, teaches  # noqa: E402
from staleflow.config.machine import cores  # noqa: E402
from staleflow.errors import ConfigError  # noqa: E402
from staleflow.observe.metrics import read_metrics  # noqa: E402
from staleflow.simulate.setting import Setting  # noqa: E402
from staleflow.study.measured import MeasuredRun, read_run  # noqa: E402

CALIBRATION = 2
"""The bound of the calibration run."""
TARGET = 10.0
"""The largest error that is aimed for, in percent."""
QUIET = 0.85
"""Share of a core for a process that has it to itself: with less, other work ran on the machine."""
MOST_S = 600
"""Time limit of one run."""
METRICS = {
    "tokens_per_s": "tokens/s",
    "step_s": "s/step",
    "mean_staleness": "mean staleness",
    "trainer_idle": "trainer idle",
    "instances_idle": "instances idle",
}
SHARES = ("trainer_idle", "instances_idle")
"""Their errors are differences in percentage points: a percentage of 3 % says nothing."""
Values = dict[str, float]


class Kind(NamedTuple):
    bound: int
    seed: int
    consume: str = "stream"

    @property
    def name(self) -> str:
        return f"bound {self.bound}" + (", whole batches" if self.consume == "batch" else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("settings", nargs="*", help="more settings of staleflow train, such as rollout.device=cuda")
    parser.add_argument("--bounds", default="0,1,2,3", help="bound 0 is run with whole batches too")
    parser.add_argument("--steps", type=amounts.count, default=30)
    parser.add_argument("--seeds", type=amounts.count, default=2)
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "staleflow-simulator-error")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--section", metavar="FILE.json", help="print the tables of earlier results")
    options = parser.parse_args()
    try:
        results = read_results(options.section) if options.section else measured(options)
    except ConfigError as error:
        print(f"simulator_error: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(results, indent=1) if options.json else section(results))
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    kinds = kinds_of(options.bounds, options.seeds, options.steps)
    folders = {kind: made(kind, options.steps, options.runs, options.settings) for kind in kinds}
    first = Kind(CALIBRATION, 0)
    run = read_run(str(folders[first]))
    return results_of(run, first, folders, options.steps)


def kinds_of(bounds: str, seeds: int, steps: int) -> list[Kind]:
    """The calibration is always among them; seeds take turns."""
    try:
        wanted = sorted({int(bound) for bound in bounds.split(",")} | {CALIBRATION})
    except ValueError:
        raise ConfigError(f"--bounds {bounds} cannot be read; give numbers with commas, such as 0,1,2,3") from None
    if wanted[0] < 0 or seeds < 1:
        raise ConfigError(f"--bounds {bounds} --seeds {seeds} is impossible; give bounds from 0 and a seed or more")
    if steps < (least := 2 * (wanted[-1] + 2)):
        raise ConfigError(f"--steps {steps} are too few for bound {wanted[-1]}; give {least} or more")
    kinds: list[Kind] = []
    for seed in range(seeds):
        kinds += [Kind(0, seed, "batch")] if 0 in wanted else []
        kinds += [Kind(bound, seed) for bound in wanted]
    if len(kinds) < 2:
        raise ConfigError(f"--bounds {bounds} --seeds {seeds} is the calibration alone; give another bound or seed")
    return kinds


# Real runs


def made(kind: Kind, steps: int, runs: Path, settings: Sequence[str] = ()) -> Path:
    """The directory of this run; the run is made if there is none."""
    folder = runs.joinpath(*settings, f"bound-{kind.bound}-{kind.consume}-seed-{kind.seed}-steps-{steps}")
    latest = folder / "latest"
    if (latest / "summary.json").is_file() and len(read_metrics(latest / "metrics.jsonl")) == steps:
        return latest
    print(f"{kind.name}, seed {kind.seed} ...", file=sys.stderr, flush=True)
    words = [f"runs={folder}", f"seed={kind.seed}", f"steps={steps}", "evaluation.every=0", "evaluation.problems=16"]
    words += [f"staleness={kind.bound}", f"strategies.consume={kind.consume}", *settings]
    command = [sys.executable, "-c", "from staleflow.cli import main; raise SystemExit(main())", "train", "laptop"]
    done = subprocess.run(
        [*command, "--json", *words], cwd=ROOT, timeout=MOST_S, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"the run in {folder} failed: {' '.join(done.stderr.splitlines()[-1:])}")
    return latest


def left_out(bound: int, steps: int) -> int:
    """Steps at the beginning that do not count, because everything is empty then."""
    return max(bound + 1, steps // 4)


def observed(folder: Path, bound: int, instances: int) -> Values:
    rows = read_metrics(folder / "metrics.jsonl")
    first = left_out(bound, len(rows))
    counted = rows[first:]
    seconds = rows[-1]["time"] - rows[first - 1]["time"]
    tokens = sum(row["tokens"] for row in counted)
    ages = sum(int(age) * count for row in counted for age, count in row["token_staleness"].items())
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(counted),
        "mean_staleness": ages / tokens,
        "trainer_idle": sum(row["idle_s"] for row in counted) / seconds,
        "instances_idle": 1 - sum(row["instances_busy_s"] for row in counted) / seconds / instances,
    }


# Predictions


def predicted(run: MeasuredRun, setting: Setting, sharing: Sharing, kind: Kind) -> Values:
    strategies = replace(setting.strategies, consume=kind.consume)
    setting = replace(setting, staleness=kind.bound, strategies=strategies)
    cluster = SharedCluster(setting, kind.seed, sharing, teaches(run))
    cluster.run()
    marks = cluster.marks
    begin, end = marks[left_out(kind.bound, len(marks)) - 1], marks[-1]
    seconds, tokens = end.time - begin.time, end.tokens - begin.tokens
    running = (end.instances_running_s - begin.instances_running_s) / setting.instances
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / (len(marks) - left_out(kind.bound, len(marks))),
        "mean_staleness": (end.ages - begin.ages) / tokens,
        "trainer_idle": (end.trainer_idle_s - begin.trainer_idle_s) / seconds,
        "instances_idle": 1 - running / seconds,
    }


def results_of(run: MeasuredRun, first: Kind, folders: Mapping[Kind, Path], steps: int) -> dict[str, Any]:
    words = [f"steps={steps}"]
    shared, fixed = alone(run, words), taught_only(run, run.setting(words))
    sharing = calibrated(Shares.of(run), shared, cores(), teaches(run))
    rows: list[dict[str, Any]] = []
    for kind, folder in folders.items():
        seen = observed(folder, kind.bound, shared.instances)
        simulated = predicted(run, shared, sharing, kind)
        plain = predicted(run, fixed, Sharing(10**6, 1.0, 1.0), kind)
        rows.append(
            {
                "setting": kind.name,
                "bound": kind.bound,
                "consume": kind.consume,
                "seed": kind.seed,
                "calibration": kind == first,
                "cpu_shares": Shares.of(read_run(str(folder)))._asdict(),
                "metrics": {key: compared(key, seen[key], simulated[key]) for key in METRICS},
                "fixed_shares": {key: compared(key, seen[key], plain[key]) for key in METRICS},
            }
        )
    rows.sort(key=lambda row: not row["calibration"])
    return {
        "machine": platform.machine(),
        "cores": cores(),
        "steps": steps,
        "calibration": facts(run, shared, sharing),
        "rows": rows,
        "worst": worst(rows),
    }


def taught_only(run: MeasuredRun, setting: Setting) -> Setting:
    """Tokens cost what those of groups that teach cost, as the trainer of ``predicted`` counts only these."""
    return replace(setting, trainer_per_token_gpu_s=run.training.per_taught_token_s or setting.trainer_per_token_gpu_s)


def facts(run: MeasuredRun, setting: Setting, sharing: Sharing) -> dict[str, Any]:
    """Facts about the calibration run."""
    return {
        "alone": sharing.alone,
        "trainer_beside_instances": sharing.trainer,
        **Shares.of(run)._asdict(),
        **run.times,
        "trainer_fixed_cpu_s": setting.trainer_fixed_s,
        "trainer_per_taught_token_cpu_s": setting.trainer_per_token_gpu_s,
        "has_profile": run.cost is not None,
    }


def compared(metric: str, seen: float, simulated: float) -> Values:
    whole = 1.0 if metric in SHARES else seen
    error = 100 * (simulated - seen) / whole if whole else 100.0 * (simulated > 0)
    return {"measured": seen, "predicted": simulated, "error": error}


def worst(rows: Iterable[Mapping[str, Any]]) -> Values:
    """By metric: the largest error of a prediction, the calibration aside."""
    others = [row for row in rows if not row["calibration"]]
    return {key: max((abs(row["metrics"][key]["error"]) for row in others), default=0.0) for key in METRICS}


# What people read


def read_results(name: str | Path) -> dict[str, Any]:
    try:
        found = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read ({error}); make it with --json") from error
    if not isinstance(found, dict) or not found.get("rows"):
        raise ConfigError(f"{name} has no rows; make it with bench/simulator_error.py --json")
    return found


def section(results: Mapping[str, Any] | str | Path) -> str:
    """The Markdown of these results, or of the file that holds them."""
    if not isinstance(results, Mapping):
        results = read_results(results)
    rows, about = results["rows"], results["calibration"]
    own = [row for row in rows if row["calibration"]]
    others = [row for row in rows if not row["calibration"]]
    parts = [
        f"Real runs of the laptop preset ({results['steps']} steps, {results['cores']} cores) beside predictions of "
        "the simulator, which knows one of them: bound 2 with the first seed. Measured -> predicted; errors of idle "
        "shares are percentage points, the others percent.",
        _table(own, "calibrated with"),
        _table(others, "predicted"),
        _verdict(results["worst"]),
        f"In the calibration run a process that had a core to itself got {about['alone']:.0%} of it, and the trainer "
        f"{about['trainer_beside_instances']:.0%} while both instances ran{_noise(about)}. With costs as they were in "
        "that run instead, whoever else has work, throughput would have been predicted with errors of "
        f"{_spread(others, 'tokens_per_s')}.",
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(errors: Mapping[str, float]) -> str:
    said = []
    for key in ("tokens_per_s", "mean_staleness"):
        verb = "within" if errors[key] <= TARGET else "beyond"
        said.append(f"{METRICS[key]} {errors[key]:.1f} % ({verb} {TARGET:g} %)")
    return f"Largest errors of a prediction: {', '.join(said)}."


def _noise(about: Mapping[str, Any]) -> str:
    return "" if about["alone"] >= QUIET else ": **other work ran on the machine, so this is not a measurement**"


def _spread(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    errors = [row["fixed_shares"][metric]["error"] for row in rows] or [0.0]
    return f"{min(errors):+.0f} to {max(errors):+.0f} %"


def _table(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    lines = [[title, "seed", *METRICS.values()], ["---"] * (2 + len(METRICS))]
    for row in rows:
        lines.append([row["setting"], str(row["seed"]), *(_cell(key, row["metrics"][key]) for key in METRICS)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(metric: str, values: Mapping[str, float]) -> str:
    seen, simulated, error = values["measured"], values["predicted"], values["error"]
    if metric in SHARES:
        return f"{seen:.0%} -> {simulated:.0%} ({error:+.0f})"
    form = ",.0f" if metric == "tokens_per_s" else ".2f"
    return f"{seen:{form}} -> {simulated:{form}} ({error:+.1f} %)"


if __name__ == "__main__":
    raise SystemExit(main())
