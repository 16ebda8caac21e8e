"""Learning curves of the embedded task of several turns, at several bounds.

    python bench/agents.py                                  # bounds 0 to 3, five seeds at bound 2: about half an hour
    python bench/agents.py --bounds 2 --seeds 5 --json

Every run is ``staleflow train agent``, one after the other. Held-out accuracy (greedy, 256 episodes) is measured beside
the run every five steps. *To 90 %* is when the first version with at least 90 % was made, without the base model, which
is made once. Finished runs are kept in ``--results`` and not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import amounts, kept  # noqa: E402

MOST_S = 900
"""Time limit of one run."""
KEPT = (
    "wall_s",
    "seconds_to_90",
    "accuracy_initial",
    "accuracy_final",
    "max_staleness",
    "violations",
    "tokens_wasted",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bounds", type=amounts.wholes, default="2,0,1,3")
    parser.add_argument("--seeds", type=amounts.count, default=5, help="at the first of the bounds; two at the others")
    parser.add_argument("--cache", help="the folder of base models, which are made once for each seed")
    parser.add_argument(
        "--results", type=kept.to_continue, default=str(Path(tempfile.gettempdir()) / "staleflow-agents.json")
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = kept.read(options.results)
    wanted = [
        (bound, seed)
        for at, bound in enumerate(options.bounds)
        for seed in range(min(2, options.seeds) if at else options.seeds)
    ]
    for bound, seed in wanted:
        if (key := f"{bound} {seed}") not in found:
            print(f"bound {bound}, seed {seed} ...", file=sys.stderr, flush=True)
            cache = [] if options.cache is None else [f"cache={options.cache}"]
            found[key] = run(bound, seed, [*cache, *options.settings])
            kept.write(options.results, found)
    runs = {key: found[key] for key in (f"{bound} {seed}" for bound, seed in wanted)}
    print(json.dumps(runs, indent=1) if options.json else table(runs))
    return 0


def run(bound: int, seed: int, settings: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as runs:
        words = ["agent", f"seed={seed}", f"staleness={bound}", f"runs={runs}", *settings, "--json"]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "staleflow", "train", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"staleflow train {' '.join(words)} failed: {done.stderr[-500:]}")
        summary = json.loads(done.stdout.splitlines()[-1])
        record: dict[str, Any] = {name: summary.get(name) for name in KEPT}
        return record | {"command_s": round(time.monotonic() - began, 1), "curve": summary.get("accuracy", [])}


def table(runs: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| bound | seed | begins | to 90 % | ends | staleness at most | wasted tokens | command |",
        "|---" * 8 + "|",
    ]
    for key, each in runs.items():
        bound, seed = key.split()
        to_90 = "-" if each["seconds_to_90"] is None else f"{each['seconds_to_90']:.0f} s"
        lines.append(
            f"| {bound} | {seed} | {each['accuracy_initial']:.1%} | {to_90} | {each['accuracy_final']:.1%} | "
            f"{each['max_staleness']} | {each['tokens_wasted']} | {each['command_s']:.0f} s |"
        )
    reached = [each["seconds_to_90"] for each in runs.values() if each["seconds_to_90"] is not None]
    lines.append(f"\n{len(reached)} of {len(runs)} reach 90 %, after {fmean(reached or [0.0]):.0f} s on average.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
