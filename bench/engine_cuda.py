"""The built-in engine on a GPU: how near a decoding step comes to what the memory allows.

    python bench/engine_cuda.py            # tables
    python bench/engine_cuda.py --json     # the same as JSON

*Steady decoding*: sequences with 2,048 tokens of context decode through ``engine.step()``, sampling and
bookkeeping included. The roofline is the time to read all weights and all KV entries once, at the bandwidth of a plain
device copy measured in the same run (bytes read and written). *Pull*: how long new weights in shared memory keep a
busy engine from decoding, against one copy of as many bytes from pinned memory. *Fit*: the cost model, as
``staleflow profile`` fits it. Comparison with transformers: ``bench/engine.py --device cuda``.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.profile import Grid, measure
from staleflow.rollout.shapes import write
from staleflow.servers.weights.parameter_server import LocalParameterServer

CASES = (("qwen-1.5b", 256, 0.70), ("qwen-0.5b", 512, 0.60))
"""Shape, sequences, and the share of the roofline to reach."""
CONTEXT = 2_048
WARM, STEPS, STEPS_PROFILED = 20, 100, 4


def engine_of(shape: str, running: int, context: int, prefill: int = 2_048) -> TorchEngine:
    with tempfile.TemporaryDirectory() as folder:
        write(shape, folder)
        options = EngineOptions(
            kv_tokens=running * (context + 256),
            max_running=running,
            prefill_tokens=prefill,
            dtype="bfloat16",
            device="cuda",
            weights="random",
        )
        return TorchEngine(folder, options)


def median_s(call: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def bandwidth() -> float:
    """Bytes read and written in a second by a plain copy on the device."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source), 9)


def fill(engine: TorchEngine, running: int, context: int) -> None:
    prompt = [1] * context
    engine.submit([Request(f"t{at}", 1, prompt, sampling=Sampling(max_tokens=10**6)) for at in range(running)])
    engine.scheduler.assume_computed()


def steady(shape: str, running: int, target: float, speed: float) -> dict[str, Any]:
    engine = engine_of(shape, running, CONTEXT)
    fill(engine, running, CONTEXT)
    for _ in range(WARM):
        engine.step()
    made, times = 0, list[float]()
    for _ in range(STEPS):
        began = time.perf_counter()
        made += engine.step().made
        times.append(time.perf_counter() - began)
    seconds = sum(times)
    assert made == STEPS * running
    weights = sum({view.data_ptr(): view.nbytes for view in engine.model.parameters.values()}.values())
    layers, _, kv_heads, head_dim = engine.model.config.geometry
    context = running * (CONTEXT + WARM + STEPS / 2)
    entries = context * layers * 2 * kv_heads * head_dim * 2
    least = (weights + entries) / speed
    return {
        "shape": shape,
        "running": running,
        "context": CONTEXT,
        "weights_gb": weights / 1e9,
        "kv_gb": entries / 1e9,
        "step_ms": 1e3 * seconds / STEPS,
        "median_ms": 1e3 * statistics.median(times),
        "roofline_ms": 1e3 * least,
        "of_roofline": least * STEPS / seconds,
        "target": target,
        "tokens_per_s": made / seconds,
        "parts": parts(engine),
    }


def parts(engine: TorchEngine) -> dict[str, float]:
    """Milliseconds of one step on the device, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS_PROFILED):
            engine.step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key if event.key.startswith(("_", "decode_few")) else "rest"
        if any(word in event.key for word in ("nvjet", "gemm", "splitK", "cublas")):
            name = "matrix products"
        found[name] = found.get(name, 0.0) + event.self_device_time_total / 1e3
    whole = sum(found.values())
    return {
        name: value / STEPS_PROFILED
        for name, value in sorted(found.items(), key=lambda item: -item[1])
        if value > whole / 200
    }


def pull(shape: str, running: int) -> dict[str, Any]:
    engine = engine_of(shape, running, 256)
    fill(engine, running, 256)
    tensors = {name: view.cpu() for name, view in engine.model.parameters.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    copied = median_s(lambda: target.copy_(pinned, non_blocking=True), 7)
    pulled: list[float] = []
    with (
        tempfile.TemporaryDirectory() as registry,
        LocalParameterServer.create("bench", registry=registry) as server,
        LocalParameterServer.attach("bench", registry=registry) as reader,
    ):
        for version in range(1, 9):
            for tensor in tensors.values():
                tensor.view(-1)[0] += 0.001 * version
            server.push(version, tensors)
            for _ in range(3):
                engine.step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            assert engine.pull(reader, version) == version
            torch.cuda.synchronize()
            pulled.append(time.perf_counter() - began)
            fill_again(engine)
    seconds = statistics.median(pulled[2:])
    return {
        "shape": shape,
        "gb": size / 1e9,
        "pull_ms": 1e3 * seconds,
        "copy_ms": 1e3 * copied,
        "ratio": seconds / copied,
        "target": 1.2,
    }


def fill_again(engine: TorchEngine) -> None:
    """Recompute the KV entries, outside of what is measured."""
    engine.scheduler.assume_computed()


def cost_fit(shape: str, running: int, context: int) -> dict[str, Any]:
    engine = engine_of(shape, running, context)
    found = measure(engine, engine.options, Grid.up_to(running, context))
    return {"shape": shape, **found.as_values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    say = (lambda _: None) if arguments.json else print
    speed = bandwidth()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "copy_gb_per_s": speed / 1e9,
        "steady": [],
        "pull": [],
    }
    say(f"{result['device']}, torch {result['torch']}, plain copy {result['copy_gb_per_s']:,.0f} GB/s")
    for case in CASES:
        row = steady(*case, speed)
        result["steady"].append(row)
        say(
            f"{row['shape']}: {row['running']} x {row['context']} tokens: {row['step_ms']:.2f} ms a step, roofline "
            f"{row['roofline_ms']:.2f} ms: {100 * row['of_roofline']:.1f} % (target {100 * row['target']:.0f}), "
            f"{row['tokens_per_s']:,.0f} tokens/s"
        )
        say("   ms by kernel: " + ", ".join(f"{name} {value:.3f}" for name, value in row["parts"].items()))
    for shape, _, _ in CASES:
        row = pull(shape, 64)
        result["pull"].append(row)
        say(
            f"{row['shape']}: pull of {row['gb']:.2f} GB {row['pull_ms']:.1f} ms, copy {row['copy_ms']:.1f} ms: "
            f"{row['ratio']:.2f} x"
        )
    result["fit"] = cost_fit("qwen-1.5b", 256, 4_096)
    error = result["fit"]["error"]
    say(
        f"fit: mean error {100 * error['mean']:.1f} %, worst {100 * error['worst']:.1f} %, "
        f"of points left out {100 * error['unseen']:.1f} %"
    )
    if arguments.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
