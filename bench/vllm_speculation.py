# pyright: reportMissingImports=false
"""Does speculation by n-grams pay? vLLM with and without it on held-out problems.

    python bench/vllm_speculation.py                  # in .venv-vllm, on a CPU: the laptop task, greedy
    python bench/vllm_speculation.py --device cuda    # SmolLM2-135M as the preset one-gpu has it, temperature 1
    python bench/vllm_speculation.py --json

Time is that of the process on a CPU, and of the clock on a GPU. Each engine has a process of its own: after one that
speculates, vLLM starts no other.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
METHOD = {"cpu": "ngram", "cuda": "ngram_gpu"}
MOST = {"cpu": 64, "cuda": 256}


def measured(sequences: list[int], rounds: int, speculates: bool, device: str) -> list[dict[str, Any]]:
    """In a process of its own."""
    from staleflow.config import load
    from staleflow.rollout.engine import Request, Sampling
    from staleflow.rollout.options import EngineOptions
    from staleflow.rollout.vllm.start import make
    from staleflow.tasks.opening import model_folder, open_source, open_task

    cpu = device == "cpu"
    clock = time.process_time if cpu else time.perf_counter
    config = load(*(("laptop", []) if cpu else ("one-gpu", ["data.held_out_count=80"])))
    folder = model_folder(config.model, config.cache, config.seed)
    task = open_task(config.data, open_source(config.data, 0), folder, 0, max(sequences))
    most, settings = MOST[device], {"speculative_config": NGRAM | {"method": METHOD[device]}}
    options = EngineOptions(
        kv_tokens=max(sequences) * (most + 192), max_running=max(sequences), threads=1, device=device,
        dtype="float32" if cpu else "bfloat16",
    )  # fmt: skip
    engine = make(folder, options, **(settings if speculates else {}))
    sampling = Sampling(max_tokens=most, temperature=0.0 if cpu else 1.0, stop_tokens=task.stop_tokens)
    found: list[dict[str, Any]] = []
    for count in sequences:
        seconds: list[float] = []
        made = steps = 0
        for turn in range(rounds + 1):
            made = steps = 0
            began = clock()
            engine.submit([Request(f"{turn}/{at}", 1, task.held_out[at][0], sampling=sampling) for at in range(count)])
            while engine.busy:
                made += engine.step().made
                steps += 1
            seconds.append(clock() - began)
        found.append({"sequences": count, "tokens": made, "steps": steps, "s": statistics.median(seconds[1:])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM with and without speculation by n-grams.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=[*METHOD], default="cpu")
    parser.add_argument("--only", choices=["plain", "ngram"], help="one of the two, as JSON")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measured(given.sequences, given.rounds, given.only == "ngram", given.device)))
        return
    sizes = ["--device", given.device, "--rounds", str(given.rounds), "--sequences", *map(str, given.sequences)]
    found: dict[str, Any] = {}
    for kind in ("plain", "ngram"):
        command = [sys.executable, str(Path(__file__)), "--only", kind, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for plain, ngram in zip(found["plain"], found["ngram"], strict=True):
        before, after = (each["tokens"] / each["s"] for each in (plain, ngram))
        print(
            f"{plain['sequences']:3} sequences: {before:.0f} tokens/s in {plain['steps']} steps, "
            f"with n-grams {after:.0f} in {ngram['steps']} ({after / before:.2f}x)"
        )


if __name__ == "__main__":
    main()
