"""The trainer on a GPU: how near a step comes to the peak, what memory it takes, and where its time goes.

    python bench/trainer_cuda.py                         # a table
    python bench/trainer_cuda.py --json out.json         # also as JSON
    python bench/trainer_cuda.py --only "1.5b .* offload_moments"
    python bench/trainer_cuda.py --smoke                 # a tiny model on whatever device there is

A step is 128 rows with prompts of 256 tokens, none of them the same, fed in four pieces and updated: *equal*, all
responses of 768 tokens, or *skewed*, lognormal with the same mean, deviation 1.5 times it, at most 8,192. The share
of the peak counts 6 operations for each parameter and token, attention not counted, against 989 dense TFLOP/s.
*Passes*: forward and backward over groups of 8 rows, from one group to a whole step, with and without sharing
prompts: what a small pass costs beyond its tokens. The breakdown is of the GPU time of one step by kind of kernel;
*idle* is what is left of the step.
"""

import argparse
import gc
import json
import platform
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bench import kept
from staleflow.servers.payloads import Row
from staleflow.training.pieces import Sizes
from staleflow.training.trainer import GroupRows, Trainer, TrainerOptions

PEAK = 989e12
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    # hidden, intermediate, layers, heads, key heads, vocabulary
    "0.5b": (896, 4864, 24, 14, 2, 151_936),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "135m": (576, 1536, 30, 9, 3, 49_152),
    "laptop": (128, 336, 3, 4, 4, 59),
    "tiny": (32, 64, 2, 4, 2, 100),
}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    (shape, kind, micro, {})
    for shape in ("0.5b", "1.5b")
    for kind, micro in (("equal", 8_192), ("equal", 16_384), ("skewed", 8_192), ("skewed", 16_384))
] + [("1.5b", kind, 16_384, {"offload_moments": True}) for kind in ("equal", "skewed")]
PASSES = {"135m": (40, 21), "0.5b": (128, 242), "1.5b": (128, 242)}
"""Tokens of prompts and responses."""
GROUPS = (1, 2, 4, 8, 32)
KINDS = {
    "attention": ("flash", "fmha"),
    "products": ("gemm", "cutlass", "cublas", "nvjet", "xmma", "splitk"),
    "small steps": ("_add_norm", "_norm_backward", "_rotate", "_swiglu", "_log_probs"),
    "update": ("adam", "lpnorm", "multi_tensor"),
}


def model_of(shape: str, device: str) -> Any:
    hidden, wide, layers, heads, key_heads, vocabulary = SHAPES[shape]
    small = shape in ("135m", "laptop", "tiny")
    config = (LlamaConfig if small else Qwen2Config)(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return (LlamaForCausalLM if small else Qwen2ForCausalLM)(config)


def step_of(
    lengths: list[int], members: int, prompt: int, vocabulary: int, version: int, one_prompt: bool = False
) -> list[GroupRows]:
    """``one_prompt``: for all members of a group; otherwise nothing that is computed can be used twice."""
    random, prompts = np.random.default_rng(version), dict[int, Any]()

    def row(at: int, size: int) -> Row:
        begun, tokens = (random.integers(0, vocabulary, count).astype("<i4") for count in (prompt, size))
        if one_prompt:
            begun = prompts.setdefault(at // members, begun)
        behaviour = np.full(size, -np.log(vocabulary), "<f4")
        return Row.of(f"p{at // members}/{at % members}", begun, tokens, behaviour, ((version, size),), float(at % 2))

    rows = [row(at, size) for at, size in enumerate(lengths)]
    return [rows[at : at + members] for at in range(0, len(rows), members)]


def lengths_of(kind: str, rows: int, mean: int, most: int) -> list[int]:
    if kind == "equal":
        return [mean] * rows
    spread = np.sqrt(np.log(1 + 1.5**2))
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - spread**2 / 2, spread, rows)
    return np.clip(drawn, 1, most).astype(int).tolist()


def wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def one_step(trainer: Trainer, groups: list[GroupRows], device: str) -> float:
    began = wait(device)
    for at in range(0, len(groups), max(1, len(groups) // 4)):
        trainer.feed(trainer.version, groups[at : at + max(1, len(groups) // 4)])
    trainer.finish(trainer.version)
    return wait(device) - began


def whole_steps(shape: str, kind: str, micro: int, device: str, rows: int, mean: int, **more: Any) -> dict[str, Any]:
    model = model_of(shape, device)
    parameters = sum(each.numel() for each in model.parameters())
    trainer = Trainer(model, TrainerOptions(2, learning_rate=1e-6, micro_tokens=micro, device=device, **more))
    lengths = lengths_of(kind, rows, mean, 32 * mean // 3)
    tokens = sum(lengths) + rows * (mean // 3)

    def groups() -> list[GroupRows]:
        return step_of(lengths, 8, mean // 3, SHAPES[shape][-1], trainer.version)

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [one_step(trainer, groups(), device) for _ in range(4)]
    took = statistics.median(times[1:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    found = {
        "shape": shape,
        "rows": kind,
        "micro_tokens": micro,
        **more,
        "tokens": tokens,
        "step_s": round(took, 4),
        "tokens_per_s": round(tokens / took),
        "share_of_peak": round(6 * parameters * tokens / took / PEAK, 4),
        "memory_gib": round(peak, 1),
    }
    return found | ({"breakdown": breakdown(trainer, groups(), device)} if device == "cuda" else {})


def breakdown(trainer: Trainer, groups: list[GroupRows], device: str) -> dict[str, Any]:
    """GPU time of one step by kind of kernel, as shares of the step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        took = one_step(trainer, groups, device)
    shares, others = Counter[str](), Counter[str]()
    launches = 0
    for event in seen.key_averages():
        name = event.key.lower()
        seconds = event.self_device_time_total / 1e6
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "rest")
        shares[kind] += seconds / took
        launches += event.count
        if kind == "rest":
            others[event.key[:90]] += seconds / took
    found: dict[str, Any] = {kind: round(share, 3) for kind, share in shares.most_common()}
    found |= {"idle": round(1 - sum(shares.values()), 3), "profiled_step_s": round(took, 4), "launches": launches}
    return found | {"largest of the rest": {name: round(share, 4) for name, share in others.most_common(5)}}


def passes(
    shape: str, shared: bool, device: str, prompt: int, response: int, counts: tuple[int, ...] = GROUPS
) -> list[dict[str, Any]]:
    """Milliseconds of feeding that many groups at once, and of the update."""
    trainer = Trainer(model_of(shape, device), TrainerOptions(2, learning_rate=1e-6, micro_tokens=16_384))
    found: list[dict[str, Any]] = []
    for count in counts:
        times, updates, asked = list[float](), list[float](), list[float]()
        groups: list[GroupRows] = []
        for _ in range(6):
            lengths = [response] * (8 * count)
            groups = step_of(lengths, 8, prompt, SHAPES[shape][-1], trainer.version, one_prompt=shared)
            began = wait(device)
            trainer.feed(trainer.version, groups)
            asked.append(time.perf_counter() - began)
            times.append(wait(device) - began)
            began = wait(device)
            trainer.finish(trainer.version)
            updates.append(wait(device) - began)
        middle = [round(1e3 * statistics.median(each[2:]), 2) for each in (times, asked, updates)]
        tokens = Sizes.of([row for group in groups for row in group], shared).total
        sizes = {"shape": shape, "shared": shared, "groups": count, "computed": tokens}
        found.append({**sizes, "pass_ms": middle[0], "asked_ms": middle[1], "update_ms": middle[2]})
    return found


def attempt(call: Any, *args: Any, **more: Any) -> Any:
    """The result of one case, or why it failed, so that the others still run."""
    try:
        return call(*args, **more)
    except Exception as error:  # out of memory, most likely
        return {"case": [str(each) for each in args], "failed": repr(error)[:300]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, on any device")
    parser.add_argument("--json", type=kept.to_write, help="write the results there too")
    parser.add_argument("--only", default="", help="a regular expression: leave out what it is not found in")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__}
    cases = [("tiny", kind, 512, {}) for kind in ("equal", "skewed")] if given.smoke else CASES
    print(json.dumps(found), flush=True)
    found["passes"], found["steps"] = [], []
    for shape, sizes in {"tiny": (40, 21)}.items() if given.smoke else PASSES.items():
        for shared in (False, True):
            if re.search(given.only, f"passes {shape}{' shared' * shared}"):
                counts = GROUPS[:1] if given.smoke else GROUPS
                rows = attempt(passes, shape, shared, device, *sizes, counts)
                found["passes"] += rows if isinstance(rows, list) else [rows]
                print(json.dumps(rows), flush=True)
                kept.write(given.json, found)
    for shape, kind, micro, more in cases:
        if re.search(given.only, " ".join([shape, kind, str(micro), *more])):
            size = (16, 24) if given.smoke else (128, 768)
            found["steps"].append(attempt(whole_steps, shape, kind, micro, device, *size, **more))
            print(json.dumps(found["steps"][-1]), flush=True)
            kept.write(given.json, found)


if __name__ == "__main__":
    main()
