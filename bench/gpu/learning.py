"""Does staleness cost learning? SmolLM2-135M on several tasks under several bounds, with held-out accuracy by step.

    python bench/gpu/learning.py --data DATA --output learning.json --picture learning.svg     # at most 8 minutes
    python bench/gpu/learning.py --jobs 3 ...       # several runs beside each other: accuracy by step, not by time
    python bench/gpu/learning.py --smoke            # the embedded model on the CPU

Every run is ``staleflow train one-gpu`` with another bound, seed or correction; accuracy is that of greedy answers to
problems that are held out of training. *arithmetic*: one-digit sums, differences and products. *word problems*: SVAMP,
*gsm8k*: GSM8K, both with short answers (a number), because that is what a model of this size can learn in minutes.
*calculator*: the word problems in turns, with a tool that calculates (``examples/agents/word_calculator.py``). What is
in the file of results is not run again; what matters most is run first.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import amounts, kept
from bench.gpu.lab import Results, train

SHORT = "{prompt}\nAnswer with one number."
ALWAYS = ["checkpoints.best=false", "samples=0"]
TASKS: dict[str, list[str]] = {
    "arithmetic": ["steps=40", "evaluation.every=5", "evaluation.problems=64", "data.held_out_count=64"],
    "word problems": [
        "steps=120", "evaluation.every=20", "evaluation.problems=200", "data.held_out_count=200",
        "data.source=DATA/word-problems/svamp_test.jsonl", "data.prompt={Body} {Question}", "data.answer=Answer",
        f"data.template={SHORT}", "data.arguments={}", "data.max_prompt_tokens=192", "rollout.max_tokens=24",
    ],
    "gsm8k": [
        "steps=120", "evaluation.every=40", "evaluation.problems=400",
        "data.source=DATA/gsm8k/train.jsonl", "data.prompt=question", "data.answer=answer",
        f"data.template={SHORT}", "data.arguments={}", "data.max_prompt_tokens=256", "rollout.max_tokens=24",
        "data.held_out_count=400",
    ],
    "calculator": [
        "steps=100", "evaluation.every=20", "evaluation.problems=200", "data.held_out_count=200",
        "data.source=examples.agents.word_calculator:problems", "data.max_prompt_tokens=320",
        "data.arguments={path: DATA/word-problems/svamp_test.jsonl}",
        "environment.play=examples.agents.word_calculator:play", "environment.max_turns=4",
        "environment.max_given=64", "environment.truncated=train", "rollout.max_tokens=128",
        "training.learning_rate=2e-5",
    ],
}  # fmt: skip
SMOKE = ["laptop", "steps=4", "evaluation.every=2", "evaluation.problems=8", "groups=4", "group_size=4"]
COLOURS = {0: "#4c78a8", 1: "#f58518", 2: "#54a24b", 3: "#b279a2", 8: "#e45756"}


class Kind(NamedTuple):
    task: str
    bound: int
    seed: int = 0
    correction: str = "truncated"
    engine: str = "builtin"

    @property
    def name(self) -> str:
        engine = "" if self.engine == "builtin" else f", {self.engine}"
        return f"{self.task}, bound {self.bound}, {self.correction}, seed {self.seed}{engine}"


def kinds() -> list[Kind]:
    first = [Kind("arithmetic", bound) for bound in (0, 2, 1, 3, 8)]
    seeds = [Kind("arithmetic", bound, seed) for seed in (1, 2) for bound in (0, 2, 1, 3, 8)]
    words = [Kind("word problems", bound, seed) for seed in (0, 1, 2) for bound in (0, 2, 8, 1, 3)]
    plain = [Kind("arithmetic", bound, seed, "none") for seed in (0, 1, 2) for bound in (8, 2)]
    turns = [Kind("calculator", bound) for bound in (2, 0)]
    vllm = Kind("arithmetic", 2, engine="vllm")
    rest = [*words[2:5], *(Kind("gsm8k", bound) for bound in (2, 0, 1, 3, 8)), *plain, *words[5:]]
    return [*first, *words[:2], *seeds, *turns, vllm, *rest]


def curve(kind: Kind, runs: Path, data: Path, smoke: bool, alone: bool) -> dict[str, Any]:
    preset, *words = SMOKE if smoke else ["one-gpu", *(word.replace("DATA", str(data)) for word in TASKS[kind.task])]
    words += [*ALWAYS, f"staleness={kind.bound}", f"seed={kind.seed}", f"training.correction={kind.correction}"]
    words += [f"rollout.engine={kind.engine}"]
    folder = train(runs, kind.name.replace(", ", "-").replace(" ", "_"), preset, words)
    summary = json.loads((folder / "summary.json").read_text())
    keys = ("wall_s", "violations", "max_staleness", "mean_staleness", "staleness_histogram", "rewards")
    accuracy = [[each["step"], round(each["seconds"], 2), each["accuracy"]] for each in summary["accuracy"]]
    return {**kind._asdict(), "alone": alone, "accuracy": accuracy, **{key: summary[key] for key in keys}}


def picture(rows: Sequence[Mapping[str, Any]], task: str) -> str:
    """Accuracy against steps: a line for each bound, the mean over seeds, with all seeds as dots."""
    usual = task, "truncated", "builtin"
    rows = [row for row in rows if (row["task"], row["correction"], row.get("engine", "builtin")) == usual]
    last = max(at for row in rows for at, _, _ in row["accuracy"])
    top = max(share for row in rows for _, _, share in row["accuracy"]) or 1.0
    parts = [f'<text x="320" y="16" text-anchor="middle">{task}: held-out accuracy by training step</text>']
    for tick in range(6):
        y = 330 - 300 * tick / 5
        parts.append(f'<line x1="50" x2="600" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="44" y="{y + 4}" text-anchor="end">{100 * top * tick / 5:.0f} %</text>')
        parts.append(f'<text x="{50 + 110 * tick}" y="348" text-anchor="middle">{last * tick / 5:g}</text>')
    for at, bound in enumerate(sorted({row["bound"] for row in rows})):
        colour, points = COLOURS.get(bound, "#888"), dict[int, list[float]]()
        for row in rows:
            if row["bound"] == bound:
                for step, _, share in row["accuracy"]:
                    points.setdefault(step, []).append(share)
        places = {step: (50 + 550 * step / last, shares) for step, shares in sorted(points.items())}
        line = " ".join(f"{x:.1f},{330 - 300 * fmean(shares) / top:.1f}" for x, shares in places.values())
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, shares in places.values():
            parts += [f'<circle cx="{x:.1f}" cy="{330 - 300 * s / top:.1f}" r="2.5" fill="{colour}"/>' for s in shares]
        seeds = max(map(len, points.values()))
        label = f"bound {bound} ({seeds} seed{'s' if seeds > 1 else ''})"
        parts.append(f'<text x="610" y="{40 + 18 * at}" fill="{colour}">{label}</text>')
    style = 'font-family="sans-serif" font-size="12" width="740" height="360"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>{"".join(parts)}</svg>\n'


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with word-problems/ and gsm8k/")
    parser.add_argument("--output", type=kept.to_continue, help="file of results, read to resume")
    parser.add_argument("--picture", type=kept.to_write, help="of the task arithmetic")
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "staleflow-learning")
    parser.add_argument("--jobs", type=amounts.count, default=1, help="runs beside each other")
    parser.add_argument("--most", type=amounts.count, help="only the first of the runs")
    parser.add_argument("--only", default="", help="a regular expression: leave out what it is not found in")
    parser.add_argument("--limit", type=amounts.amount, default=420, help="seconds after which no run is started")
    parser.add_argument("--smoke", action="store_true", help="one short run of the embedded model on the CPU")
    given = parser.parse_args(arguments)
    results, end = Results(given.output), time.monotonic() + given.limit
    results.head()

    def run(kind: Kind) -> tuple[Kind, dict[str, Any] | str | None]:
        if time.monotonic() > end:
            return kind, None
        try:
            return kind, curve(kind, given.runs, given.data, given.smoke, given.jobs == 1)
        except Exception as error:  # the others are worth having
            return kind, f"{type(error).__name__}: {error}"

    wanted = [kind for kind in kinds() if re.search(given.only, kind.name)][: 1 if given.smoke else given.most]
    with ThreadPoolExecutor(given.jobs) as pool:
        for kind, found in pool.map(run, [kind for kind in wanted if kind.name not in results.found]):
            if isinstance(found, dict):
                results.measure(kind.name, lambda found=found: found)
            elif found is not None:
                print(f"{kind.name} failed: {found}", file=sys.stderr, flush=True)
    rows = [row for name, row in results.found.items() if name != "run"]
    if given.picture is not None and rows:
        given.picture.write_text(picture(rows, "arithmetic"))
    return results.found


if __name__ == "__main__":
    main()
