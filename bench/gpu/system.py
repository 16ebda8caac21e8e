"""The whole system on one GPU: trained tokens/s at several bounds, whole batches and streamed, on a skewed workload.

    python bench/gpu/system.py --output system.json --runs RUNS        # at most 8 minutes; run again to resume
    python bench/gpu/system.py --workload smollm ...                   # SmolLM2-135M as the preset one-gpu has it
    python bench/gpu/system.py --engine vllm --cells 0-batch 2-stream ...
    python bench/gpu/system.py --set training.share_prompts=false ...  # the same with other settings
    python bench/gpu/system.py --trace traces ...                      # where an instance's time goes (traced.py)
    python bench/gpu/system.py --smoke                                 # a tiny model on the CPU

*skewed*: Qwen2.5's 0.5 B shape (``--shape``) with random weights; 32 groups of 8, prompts of 128 tokens, responses of a
lognormal length (mean 256, longest 4,096; ``bench/gpu/skewed.py``). *smollm*: SmolLM2-135M-Instruct on one-digit
arithmetic, with a learning rate so small that the workload stays what it is, and rewards by a hash, as in
``trl_grpo.py``. Instances (``--instances``) and the
trainer are processes on one card, so what one computes the others wait for: the card's own sum of work limits all
bounds, and asynchrony gains what would otherwise be spent waiting for long responses. The first quarter of the steps is
left out, or bound + 1 of them. Bound 0 with whole batches is the synchronous loop.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import amounts, kept
from bench.gpu import skewed
from bench.gpu.lab import Results, Sampled, train
from bench.simulator_error import observed

CELLS = [(0, "batch"), (2, "stream"), (1, "stream"), (3, "stream"), (2, "batch"), (1, "batch"), (3, "batch")]
"""Bound and consumption; what matters most comes first."""
STEPS = {"skewed": {0: 8, 1: 12, 2: 16, 3: 16}, "smollm": {0: 30, 1: 40, 2: 40, 3: 40}}
ALWAYS = ["evaluation.every=0", "evaluation.problems=1", "checkpoints.best=false", "samples=0"]
OF_CELLS = ("staleness", "strategies.consume", "steps", "rollout.instances")


def settings(workload: str, shape: str, folder: Path, engine: str) -> list[str]:
    if workload == "smollm":
        plain = ["training.learning_rate=1e-9", "reward.function=bench.gpu.skewed:reward"]
        return [*ALWAYS, *plain, f"rollout.engine={engine}"]
    sizes = ["rollout.kv_tokens=524288", "rollout.max_running=512", "training.learning_rate=1e-9"]
    own = {"builtin": "engine", "vllm": "vllm_engine"}[engine]
    return [*ALWAYS, *sizes, *skewed.words(shape, folder / shape, mean=256, longest=4096, prompt=128, engine=own)]


def traced(words: list[str], to: Path) -> list[str]:
    """The same settings with an engine that writes down its steps."""
    key, kept = "rollout.engine_arguments=", [word for word in words if not word.startswith("rollout.engine")]
    rest = [word.removeprefix(key).strip("{}") for word in words if word.startswith(key)]
    return [*kept, "rollout.engine=bench.gpu.traced:engine", f"{key}{{{', '.join([f'to: {to.absolute()}', *rest])}}}"]


def small(folder: Path) -> list[str]:
    sizes = ["groups=4", "group_size=2", "rollout.device=cpu", "rollout.dtype=float32", "training.device=cpu"]
    sizes += ["rollout.kv_tokens=4096", "rollout.max_running=8", "strategies.headroom=16", "reward.workers=1"]
    return [*ALWAYS, *sizes, *skewed.words("tiny", folder / "tiny", mean=8, longest=32, prompt=8)]


def cell(
    runs: Path, name: str, words: list[str], bound: int, consume: str, steps: int, instances: int
) -> dict[str, Any]:
    with Sampled() as sampled:
        own = zip(OF_CELLS, (bound, consume, steps, instances), strict=True)
        folder = train(runs, name, "one-gpu", [*words, *(f"{key}={value}" for key, value in own)])
    return {"steps": steps, **observed(folder, bound, instances), "card_busy": sampled.percent}


def picture(found: Mapping[str, Any]) -> str:
    """How busy the card was, by its own count, from the start of each run to its end."""
    rows = {name: row["card_busy"] for name, row in found.items() if row.get("card_busy")}
    longest, parts = max(map(len, rows.values()), default=1), list[str]()
    for at, (name, percent) in enumerate(rows.items()):
        base = 75 + 80 * at
        line = " ".join(f"{10 + 700 * x / longest:.1f},{base - each / 2:.1f}" for x, each in enumerate(percent))
        parts.append(
            f'<text x="10" y="{base - 56}">{name}: {len(percent) / 4:.0f} s, kernels 0 to 100 % of the time</text>'
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="#4c78a8"/>')
    style = f'font-family="sans-serif" font-size="12" width="720" height="{80 * len(rows) + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>{"".join(parts)}</svg>\n'


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=kept.to_continue, help="file of results, read to resume")
    parser.add_argument("--picture", type=kept.to_write, help="how busy the card was, over time")
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "staleflow-system")
    parser.add_argument("--workload", choices=[*STEPS], default="skewed")
    parser.add_argument("--shape", default="qwen-0.5b")
    parser.add_argument("--engine", choices=("builtin", "vllm"), default="builtin")
    parser.add_argument("--instances", type=amounts.count, default=1)
    parser.add_argument("--cells", nargs="+", help="some of the cells, such as 0-batch 2-stream, in this order")
    parser.add_argument("--limit", type=amounts.amount, default=420, help="seconds after which no run is started")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the runs besides")
    parser.add_argument("--steps", type=amounts.count, help="of each run, instead of the usual number")
    parser.add_argument("--trace", type=Path, help="folder for traces of the built-in engine (traced.py)")
    parser.add_argument("--smoke", action="store_true", help="a short run of a tiny model on the CPU")
    given = parser.parse_args(arguments)
    if own := [each for each in given.set if each.partition("=")[0] in OF_CELLS]:
        parser.error(f"--set {own[0]}: that is what cells differ in, give --cells, --steps or --instances")
    given.runs = given.runs.resolve()  # the command runs in another folder
    results = Results(given.output, given.limit)
    results.head()
    kind = "smoke" if given.smoke else f"skewed {given.shape}" if given.workload == "skewed" else given.workload
    kind += "" if given.engine == "builtin" else f" on {given.engine}"
    words = small(given.runs) if given.smoke else settings(given.workload, given.shape, given.runs, given.engine)
    wanted = [(int(bound), how) for bound, how in (cell.split("-") for cell in given.cells)] if given.cells else CELLS
    kind += "".join(f", {setting}" for setting in given.set)
    words += given.set
    for bound, consume in CELLS[1:2] if given.smoke else wanted:
        steps = 5 if given.smoke else given.steps or STEPS[given.workload][bound]
        name = f"{kind}, {given.instances} x rollout, bound {bound}, {consume}"
        folder = given.runs / f"{kind}-{given.instances}".replace(", ", "-").replace(" ", "-")
        own = traced(words, given.trace / name.replace(", ", "-").replace(" ", "_")) if given.trace else words
        results.measure(
            name,
            lambda at=(bound, consume, steps), f=folder, own=own: cell(
                f, f"{at[0]}-{at[1]}", own, *at, given.instances
            ),
        )
    if given.picture is not None:
        given.picture.write_text(picture(results.found))
    return results.found


if __name__ == "__main__":
    main()
