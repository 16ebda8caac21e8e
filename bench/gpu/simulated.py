"""The runs of ``system.py`` predicted by the simulator: what it says beside what was measured, with the errors.

    python bench/gpu/simulated.py --runs RUNS/skewed-qwen-0.5b-2 --tail tail.json --json error.json     # no GPU needed
    python bench/gpu/simulated.py --measured system.json ...       # also cells of which only the results are at hand

The production control plane runs over modelled engines and a modelled trainer, with the lengths that the runs had.
Costs are those of a process that has the card to itself: of decoding, the cells of ``tail.py``; of a step with prefill,
also its launches (``--launches``: the kinds of steps that ``tail.py`` tells apart); of prefill and training, the
synchronous run, in which nothing else happens meanwhile. Kernels of different processes do not run at the
same time: the card is theirs in turn (*in turn*). The trainer's share of it while instances run is the one number taken
from the run with bound 2: how much longer a token took to train there. Instances have the rest, evenly. *As if alone*
is the prediction without that, *as in bound 2* the one with costs as they were inside that run, whoever else had work
there.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu.skewed import length
from bench.shared_cores import SharedCluster
from bench.simulator_error import METRICS, compared, left_out, observed
from staleflow.coordinator.cost import CostModel
from staleflow.observe.metrics import read_metrics
from staleflow.rollout.fit import Point, fit
from staleflow.simulate.setting import Setting, setting_of
from staleflow.simulate.trace import Trace
from staleflow.study.measured import read_run

SYNCHRONOUS, CONTENDED = "0-batch", "2-stream"
MOST = 0.9
"""The trainer's largest share of the card, whatever a noisy run measured: instances are left something."""
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Turns:
    """How fast processes on one card are: speeds as ``SharedCluster`` asks for them."""

    trainer: float | None
    """The trainer's share of the card while instances run, which have the rest; None: everyone has a card."""
    cores: int = 1

    def speeds(self, running: int, training: bool) -> tuple[float, float]:
        """Of each running instance, and of the trainer."""
        if self.trainer is None:
            return 1.0, 1.0
        share = self.trainer if training and running else float(training)
        return (1 - share) / max(1, running), max(share, self.trainer)


@dataclass(frozen=True, slots=True)
class Launching(CostModel):
    """An engine whose steps with prefill are not CUDA graphs: launches take ``launches`` seconds more."""

    launches: float = 0.0

    def step(self, running: int, context: int, prefill: int = 0) -> float:
        return CostModel.step(self, running, context, prefill) + self.launches * bool(prefill)

    def steps(self, count: int, running: int, context: int, prefill: int = 0) -> float:
        return CostModel.steps(self, count, running, context, prefill) + self.launches * bool(prefill) * count


def decoding(cells: Mapping[str, Any], shape: str, per_prefill_token: float, launches: float) -> Any:
    """The cost model of an engine that has the card to itself, by the cells of ``tail.py``."""
    points: list[Point] = []
    for name, cell in cells.items():
        if name.startswith(shape) and name.endswith("few"):
            running, context = (int(each) for each in name.removeprefix(shape).removesuffix("few").split(" x "))
            points.append(Point(running, running * context, cell["ms"] / 1e3))
    found, errors = fit(points, per_prefill_token)
    return Launching(**asdict(found), launches=launches), errors


def training(folder: Path) -> float:
    """Seconds of training for each token; the first step, which compiles, is left out."""
    rows = read_metrics(folder / "metrics.jsonl")[1:]
    return sum(row["train_s"] for row in rows) / sum(row["tokens"] + row["prompt_tokens"] for row in rows)


def predicted(setting: Setting, turns: Turns) -> dict[str, float]:
    cluster = SharedCluster(setting, 0, turns, lambda _: True)  # type: ignore[arg-type]
    cluster.run()
    marks, first = cluster.marks, left_out(setting.staleness, setting.steps)
    begin, end = marks[first - 1], marks[-1]
    seconds, tokens = end.time - begin.time, end.tokens - begin.tokens
    running = (end.instances_running_s - begin.instances_running_s) / setting.instances
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / (len(marks) - first),
        "mean_staleness": (end.ages - begin.ages) / tokens,
        "trainer_idle": (end.trainer_idle_s - begin.trainer_idle_s) / seconds,
        "instances_idle": 1 - running / seconds,
    }


def seen_in(runs: Path, instances: int) -> dict[str, dict[str, Any]]:
    """What was measured, by the folders of the runs."""
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted(runs.iterdir()):
        seen = observed(folder, int(folder.name.split("-")[0]), instances)
        found[folder.name] = {"steps": read_run(str(folder)).summary["steps"], **seen}
    return found


def written(results: Mapping[str, Any], shape: str, instances: int) -> dict[str, dict[str, Any]]:
    """What was measured, by a file of results of ``system.py``."""
    head = f"skewed {shape}, {instances} x rollout, bound "
    rows = {name.removeprefix(head): row for name, row in results.items() if name.startswith(head)}
    return {name.replace(", ", "-"): row for name, row in rows.items()}


def compare(
    runs: Path,
    cells: Mapping[str, Any],
    shape: str,
    mean: int,
    longest: int,
    prompt: int,
    launches: float = 0.0,
    results: Mapping[str, Any] | None = None,
) -> Rows:
    """By run: each figure measured and predicted, in three ways."""
    alone, shared = read_run(str(runs / SYNCHRONOUS)), read_run(str(runs / CONTENDED))
    assert alone.cost is not None
    costs, errors = decoding(cells, shape, alone.cost.per_prefill_token / alone.summary["instances"], launches)
    per_token_s = training(runs / SYNCHRONOUS)
    share = min(MOST, per_token_s / training(runs / CONTENDED))
    alone_us = 1e6 * per_token_s
    print(
        f"decoding alone: {costs}, mean error {errors.mean:.1%}; training alone: {alone_us:.2f} us a token",
        file=sys.stderr,
    )
    print(f"the trainer's share beside instances: {share:.2f}", file=sys.stderr)
    found: Rows = {}
    instances, size = alone.summary["instances"], alone.summary["group_size"]
    for name, seen in (written(results or {}, shape, instances) | seen_in(runs, instances)).items():
        bound, consume = name.split("-")
        steps = seen["steps"]
        count = alone.summary["groups"] * (steps + int(bound) + 2)
        trace = Trace(
            (prompt,) * count,
            tuple(tuple(length(f"p{at}/{member}", mean, longest) for member in range(size)) for at in range(count)),
        )
        words = [f"steps={steps}", f"staleness={bound}", f"strategies.consume={consume}"]
        own = setting_of(alone.config(words), "alone", trace)
        own = replace(own, rollout=costs, trainer_per_token_gpu_s=per_token_s, trainer_fixed_s=0.0)
        then = setting_of(shared.config(words), "contended", trace)
        ways = {
            "in turn": (own, Turns(share)),
            "as if alone": (own, Turns(None)),
            "as in bound 2": (then, Turns(None)),
        }
        found[name] = {
            way: {key: compared(key, seen[key], values[key]) for key in METRICS}
            for way, values in ((way, predicted(*given)) for way, given in ways.items())
        }
    return found


def table(rows: Rows) -> str:
    lines = ["| run | way | " + " | ".join(METRICS.values()) + " |", "|---|---|" + "---|" * len(METRICS)]
    for run, ways in rows.items():
        for way, figures in ways.items():
            cells = (
                f"{each['measured']:,.2f} -> {each['predicted']:,.2f} ({each['error']:+.0f})"
                for each in figures.values()
            )
            lines.append(f"| {run} | {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> Rows:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs named BOUND-CONSUME")
    parser.add_argument("--tail", type=Path, required=True, help="what tail.py wrote")
    parser.add_argument("--shape", default="qwen-0.5b")
    parser.add_argument("--lengths", type=int, nargs=3, default=(256, 4096, 128), help="mean, longest, prompt")
    parser.add_argument("--launches", type=float, default=0.018, help="seconds")
    parser.add_argument("--measured", type=Path, help="what system.py wrote: cells without a folder of their own")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    results = json.loads(given.measured.read_text()) if given.measured is not None else None
    cells = json.loads(given.tail.read_text())
    rows = compare(given.runs, cells, given.shape, *given.lengths, launches=given.launches, results=results)
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
