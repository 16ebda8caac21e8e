"""Decoding with few sequences on a GPU: every cell with the kernels for few rows and without them, in the same run.

    python bench/gpu/tail.py --output tail.json            # about 5 minutes on an H200; run again to resume
    python bench/gpu/tail.py --smoke                       # the same on a CPU with a tiny model, seconds

*Steady*: milliseconds of an ``engine.step()``, sampling and bookkeeping included, against the time to read weights and
KV entries once at the speed of a plain device copy measured in the same run. *Skewed*: 512 requests with prompts of 256
tokens and lognormal lengths (mean 493, longest 7,924), 256 running, wall seconds of a second run; graphs are recorded
in a first. *Prefill*: a step that prefills a prompt beside 64 sequences of 512 tokens, and the same steps without.
Every result is written to the file at once, and what is there already is not measured again.
"""

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import kept
from bench.gpu.lab import Results
from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.shapes import SHAPES, write

WAYS = ("plain", "few")


@dataclass(frozen=True)
class Sizes:
    device: str = "cuda"
    dtype: str = "bfloat16"
    shapes: tuple[str, ...] = ("qwen-1.5b", "qwen-0.5b")
    running: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (512, 4096)
    full: tuple[tuple[str, int, int], ...] = (("qwen-1.5b", 256, 2048), ("qwen-0.5b", 512, 2048))
    warm: int = 20
    steps: int = 100
    requests: int = 512
    prompt: int = 256
    mean: int = 512
    longest: int = 8192
    most: int = 256
    beside: int = 64
    prefills: tuple[int, ...] = (32, 256, 1024, 2048, 8192)


SMOKE = Sizes("cpu", "float32", ("tiny",), (1, 2), (32,), (("tiny", 4, 32),), 1, 3, 6, 8, 6, 16, 4, 2, (8, 16))


def engine_of(sizes: Sizes, shape: str, running: int, tokens: int, way: str, prefill: int = 2048) -> TorchEngine:
    with tempfile.TemporaryDirectory() as folder:
        write(shape, folder)
        options = EngineOptions(
            kv_tokens=tokens,
            max_running=running,
            prefill_tokens=prefill,
            dtype=sizes.dtype,  # type: ignore[reportArgumentType]
            device=sizes.device,
            weights="random",
            persistent_kernel=way != "plain",
        )
        return TorchEngine(folder, options)


def bandwidth(sizes: Sizes) -> float:
    """Bytes read and written in a second by a plain copy on the device."""
    source = torch.empty((4 << 30) if sizes.device == "cuda" else 1 << 20, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(7):
        times.append(seconds(lambda: target.copy_(source), sizes))
    return 2 * source.numel() / min(times)


def seconds(call: Callable[[], object], sizes: Sizes) -> float:
    wait = torch.cuda.synchronize if sizes.device == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def steady(sizes: Sizes, shape: str, running: int, context: int, way: str, speed: float) -> dict[str, float]:
    engine = engine_of(sizes, shape, running, running * (context + 256), way)
    sampling = Sampling(max_tokens=10**6)
    engine.submit([Request(f"t{at}", 1, [1] * context, sampling=sampling) for at in range(running)])
    engine.scheduler.assume_computed()
    for _ in range(sizes.warm):
        engine.step()
    took = seconds(lambda: [engine.step() for _ in range(sizes.steps)], sizes) / sizes.steps
    weights = sum({view.data_ptr(): view.nbytes for view in engine.model.parameters.values()}.values())
    entry = sum(layer[:, 0].nbytes for layer in engine.attention.entries)
    least = (weights + running * (context + sizes.warm + sizes.steps / 2) * entry) / speed
    engine.close()
    return {"ms": 1e3 * took, "roofline_ms": 1e3 * least, "of_roofline": least / took}


def prefill(sizes: Sizes, shape: str, tokens: int) -> dict[str, float]:
    """A step that prefills so many tokens beside sequences that decode; the median of some, and without the prefill."""
    context, running = sizes.contexts[0], sizes.beside
    engine = engine_of(sizes, shape, running + 1, running * (context + 256) + 4 * tokens, "few", tokens)
    engine.scheduler.patience = 0.0
    sampling = Sampling(max_tokens=10**6)
    engine.submit([Request(f"t{at}", 1, [1] * context, sampling=sampling) for at in range(running)])
    engine.scheduler.assume_computed()
    took: dict[str, list[float]] = {"with": [], "without": []}

    def step() -> None:
        began = time.perf_counter()
        output = engine.step()
        took["with" if output.prefilled else "without"].append(time.perf_counter() - began)

    for at in range(sizes.warm):
        engine.submit([Request(f"p{at}", 1, [2 + at, *[at % 5] * (tokens - 1)], sampling=Sampling(max_tokens=1))])
        for _ in range(4):
            step()
    engine.close()
    return {f"{kind}_ms": 1e3 * sorted(each)[len(each) // 2] for kind, each in took.items()}


def mix(vocabulary: int, requests: int, prompt: int, mean: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and lognormal lengths of responses."""
    sigma = math.sqrt(math.log(1 + 1.5**2))
    drawn = np.random.default_rng(0).lognormal(math.log(mean) - sigma**2 / 2, sigma, requests)
    prompts = np.random.default_rng(1).integers(0, vocabulary, (requests, prompt)).tolist()
    return prompts, np.clip(np.rint(drawn), 1, longest).astype(int).tolist()


def skewed(sizes: Sizes, way: str) -> dict[str, Any]:
    """Seconds in all, and of steps of each kind: with prefill, launched only when the tokens before were known, and
    launched ahead with more than 32 sequences or with fewer."""
    shape = sizes.shapes[0]
    prompts, lengths = mix(SHAPES[shape]["vocab_size"], sizes.requests, sizes.prompt, sizes.mean, sizes.longest)
    engine = engine_of(sizes, shape, sizes.most, sizes.requests * (sizes.prompt + 2 * sizes.mean), way)
    steps = few = 0
    kinds: dict[str, list[float]] = {}

    def run(name: str) -> None:
        nonlocal steps, few
        steps = few = 0
        kinds.clear()
        engine.pool.forget()
        pairs = zip(prompts, lengths, strict=True)
        engine.submit(
            [Request(f"{name}{at}", 1, p, sampling=Sampling(max_tokens=n)) for at, (p, n) in enumerate(pairs)]
        )
        while engine.busy:
            ahead, began = engine._ahead is not None, time.perf_counter()
            output = engine.step()
            took = time.perf_counter() - began
            steps += 1
            few += output.made <= 32
            size = next(most for most in (1, 2, 4, 8, 16, 32, 64, 128, 10**9) if output.made <= most)
            kind = "prefill" if output.prefilled else f"{'ahead' if ahead else 'not ahead'}, at most {size}"
            kinds.setdefault(kind, []).append(took)

    first, second = (seconds(lambda name=name: run(name), sizes) for name in ("a", "b"))
    engine.close()
    sums = {kind: {"steps": len(each), "seconds": sum(each)} for kind, each in sorted(kinds.items())}
    return {"seconds": second, "first_seconds": first, "steps": steps, "steps_with_at_most_32": few, "kinds": sums}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=kept.to_continue, help="file of results, read to resume")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--only", default="", help="a regular expression: leave out what it is not found in")
    given = parser.parse_args(arguments)
    sizes = SMOKE if given.smoke else Sizes()
    results = Results(given.output)
    results.head()
    speed = results.measure("copy_gb_per_s", lambda: bandwidth(sizes) / 1e9) * 1e9
    cells = [(shape, n, context) for shape in sizes.shapes for n in sizes.running for context in sizes.contexts]
    calls: dict[str, Callable[[], Any]] = {f"skewed {way}": lambda way=way: skewed(sizes, way) for way in WAYS}
    for shape, n, context in (*cells, *sizes.full):
        for way in WAYS:
            cell = (shape, n, context, way)
            calls[f"{shape} {n} x {context} {way}"] = lambda cell=cell: steady(sizes, *cell, speed)
    for shape in sizes.shapes:
        for tokens in sizes.prefills:
            calls[f"{shape} prefill {tokens}"] = lambda cell=(shape, tokens): prefill(sizes, *cell)
    for name, call in calls.items():
        if re.search(given.only, name):
            results.measure(name, call)
    return results.found


if __name__ == "__main__":
    main()
