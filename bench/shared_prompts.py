"""What it is worth to compute the prompt of a group once for all its responses (``training.share_prompts``).

    python bench/shared_prompts.py                        # on a CPU, one thread: minutes
    python bench/shared_prompts.py --device cuda          # on a GPU
    python bench/shared_prompts.py --json out.json        # also as JSON
    python bench/shared_prompts.py --smoke                # a tiny model on whatever device there is

Two trainers of the same model take turns over the same steps: one computes rows as they are, one shares prompts. A
step is fed whole and updated. *Gain* is the median of the ratios of their times, step by step; *computed* is the share
of the rows' tokens that is left. Responses are lognormal with the given mean and a deviation as large.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench import amounts, kept
from bench.trainer_cuda import SHAPES, model_of, step_of, wait
from staleflow.training.pieces import Sizes
from staleflow.training.trainer import GroupRows, Trainer, TrainerOptions
from staleflow.types import Row

MEMBERS = 8


class Case(NamedTuple):
    name: str
    shape: str
    groups: int
    prompt: int
    mean: int
    """Tokens of a response."""
    longest: int
    micro_tokens: int


CPU = [
    Case("adder, as in laptop", "laptop", 16, 4, 25, 112, 1024),
    Case("one-digit arithmetic", "135m", 4, 48, 13, 48, 512),
    Case("word problems", "135m", 2, 100, 100, 256, 1024),
]
GPU = [
    Case("one-digit arithmetic, as in one-gpu", "135m", 32, 48, 13, 48, 16_384),
    Case("prompts of 128, responses of 242", "0.5b", 32, 128, 242, 4096, 16_384),
    Case("prompts of 256, responses of 768", "0.5b", 16, 256, 768, 8192, 16_384),
    Case("prompts of 128, responses of 242", "1.5b", 32, 128, 242, 4096, 16_384),
    Case("prompts of 256, responses of 768", "1.5b", 16, 256, 768, 8192, 16_384),
    Case("prompts of 2,048, responses of 512", "1.5b", 8, 2048, 512, 4096, 16_384),
]
SMOKE = [Case("smoke", "tiny", 2, 24, 6, 12, 256)]


def lengths_of(case: Case) -> list[int]:
    spread = np.sqrt(np.log(2))
    drawn = np.random.default_rng(0).lognormal(np.log(case.mean) - spread**2 / 2, spread, MEMBERS * case.groups)
    return np.clip(drawn, 1, case.longest).astype(int).tolist()


def seconds(trainer: Trainer, groups: list[GroupRows], device: str) -> float:
    began = wait(device)
    trainer.feed(trainer.version, groups)
    trainer.finish(trainer.version)
    return wait(device) - began


def memory_of(device: str, most: bool = False) -> float:
    """GiB on a GPU now, or at ``most`` since the last call without it."""
    if device != "cuda":
        return 0.0
    if most:
        return torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def measured(case: Case, device: str, repeats: int) -> dict[str, Any]:
    gc.collect()  # trainers are in cycles, and those of the case before still have the GPU's memory
    times: dict[bool, list[float]] = {False: [], True: []}
    memory: dict[bool, float] = {}
    common: dict[str, Any] = {"learning_rate": 1e-6, "micro_tokens": case.micro_tokens}
    trainers = {
        share: Trainer(model_of(case.shape, device), TrainerOptions(0, share_prompts=share, **common))
        for share in (False, True)
    }
    lengths = lengths_of(case)
    rows: list[Row] = []
    for step in range(repeats + 1):  # the first compiles
        groups = step_of(lengths, MEMBERS, case.prompt, SHAPES[case.shape][-1], step, one_prompt=True)
        rows = [row for group in groups for row in group]
        for share, trainer in trainers.items():
            before = memory_of(device)
            times[share].append(seconds(trainer, groups, device))
            memory[share] = memory_of(device, most=True) - before
    sizes = Sizes.of(rows)
    whole, shared = (statistics.median(times[share][1:]) for share in (False, True))
    return {
        **case._asdict(),
        "rows": len(rows),
        "tokens": sum(sizes.tokens),
        "computed": round(sizes.total / sum(sizes.tokens), 3),
        "whole_s": round(whole, 4),
        "shared_s": round(shared, 4),
        "gain": round(statistics.median(a / b for a, b in zip(times[False][1:], times[True][1:], strict=True)), 2),
        **({"whole_gib": round(memory[False], 2), "shared_gib": round(memory[True], 2)} if device == "cuda" else {}),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=amounts.count, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny, on any device")
    parser.add_argument("--json", type=kept.to_write, help="write the results there too")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    on_gpu = given.device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else platform.machine()
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__, "rows": []}
    print("| | shape | prompt | response | computed | whole, s | shared, s | gain |")
    print("|---|---|---|---|---|---|---|---|")
    for case in SMOKE if given.smoke else GPU if on_gpu else CPU:
        row = measured(case, given.device, 1 if given.smoke else given.repeats)
        found["rows"].append(row)
        cells = (case.name, case.shape, case.prompt, case.mean, f"{row['computed']:.0%}")
        print("|", " | ".join(map(str, cells)), f"| {row['whole_s']} | {row['shared_s']} | **{row['gain']}** |")
        kept.write(given.json, found)
    return found


if __name__ == "__main__":
    main()
