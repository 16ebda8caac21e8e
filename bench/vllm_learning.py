"""Does the laptop task learn alike with vLLM? Both engines, several seeds each, held-out accuracy by step.

    python bench/vllm_learning.py --output docs/results/vllm_learning.json      # in .venv-vllm; continues what is there
    python bench/vllm_learning.py --output docs/results/vllm_learning.json --json

Runs of one seed begin with the same model and the same prompts. ``difference`` is the mean over seeds of vLLM's
accuracy minus the built-in engine's after a step, with its 95 % interval (Student's t).
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts, kept
from bench.gpu.lab import Results, train

ENGINES = ("builtin", "vllm")
STEPS, EVERY = 12, 4
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""By the number of differences: the quantile of the 95 % interval."""


def accuracies(engine: str, bound: int, seed: int, folder: Path, smoke: bool) -> dict[str, Any]:
    words = [
        f"rollout.engine={engine}",
        f"staleness={bound}",
        f"seed={seed}",
        "rollout.instances=1",
        f"steps={2 if smoke else STEPS}",
    ]
    words += [f"evaluation.every={1 if smoke else EVERY}"] + (["groups=4", "evaluation.problems=8"] if smoke else [])
    run = train(folder, f"{engine}-{bound}-{seed}", "laptop", words)
    summary = json.loads((run / "summary.json").read_text())
    found = {str(each["step"]): each["accuracy"] for each in summary["accuracy"]}
    kept = {key: summary[key] for key in ("violations", "mean_staleness", "wall_s")}
    return {"engine": engine, "bound": bound, "seed": seed, "accuracy": found, **kept}


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By step: vLLM's accuracy minus the built-in engine's, over the seeds that both have."""
    by_run = {(row["engine"], row["seed"]): row["accuracy"] for row in rows}
    seeds = sorted(seed for engine, seed in by_run if engine == "vllm" and ("builtin", seed) in by_run)
    pairs = [(by_run["vllm", seed], by_run["builtin", seed]) for seed in seeds]
    steps = pairs[0][0] if pairs else ()
    return {"seeds": seeds, "steps": {step: apart([one[step] - other[step] for one, other in pairs]) for step in steps}}


def apart(differences: list[float]) -> dict[str, float]:
    interval = math.inf
    if (count := len(differences)) in STUDENT:
        interval = STUDENT[count] * statistics.stdev(differences) / count**0.5
    return {"difference": statistics.fmean(differences), "interval": interval}


def main() -> None:
    parser = argparse.ArgumentParser(description="The laptop task with the built-in engine and with vLLM.")
    parser.add_argument("--output", type=kept.to_continue, help="file of results, read to resume")
    parser.add_argument("--bounds", type=amounts.whole, nargs="+", default=[2, 0])
    parser.add_argument("--seeds", type=amounts.count, default=3)
    parser.add_argument("--limit", type=amounts.amount, default=480.0, help="seconds after which nothing is begun")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="two steps with the built-in engine only")
    given = parser.parse_args()
    results = Results(given.output, given.limit)
    results.head()
    wanted = [(bound, seed, engine) for bound in given.bounds for seed in range(given.seeds) for engine in ENGINES]
    with tempfile.TemporaryDirectory() as folder:
        for bound, seed, engine in wanted:
            if engine == "builtin" or not given.smoke:
                name, call = f"{engine}, bound {bound}, seed {seed}", (engine, bound, seed, Path(folder), given.smoke)
                results.measure(name, lambda call=call: accuracies(*call))
    rows = [row for name, row in results.found.items() if name != "run"]
    bounds = {bound: compared([row for row in rows if row["bound"] == bound]) for bound in given.bounds}
    if given.json:
        print(json.dumps({"runs": rows, "bounds": bounds}, indent=1))
        return
    for row in rows:
        points = ", ".join(f"{version}: {share:.1%}" for version, share in row["accuracy"].items())
        print(f"bound {row['bound']} {row['engine']:8} seed {row['seed']}   {points}")
    for bound, each in bounds.items():
        for step, found in each["steps"].items():
            line = f"{found['difference']:+.1%} +- {found['interval']:.1%}, {len(each['seeds'])} seeds"
            print(f"bound {bound}, step {step}: vLLM - built-in {line}")


if __name__ == "__main__":
    main()
