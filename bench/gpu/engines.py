# pyright: reportMissingImports=false
"""The built-in engine, vLLM by our adapter and vLLM alone, side by side on one GPU, in one run.

    python bench/gpu/engines.py --output engines.json            # about 5 minutes on an H200; run again to resume
    python bench/gpu/engines.py --smoke                          # a tiny model on the CPU, with vLLM where it is

Each side is a process. They start beside each other, which says how long a start takes, and then measure in turn, while
the others wait. Qwen2.5's 1.5 B shape, random weights, bfloat16, temperature 1, log-probabilities of what is drawn.

*steady*: milliseconds of a step in which all sequences decode. *skewed*: the mix of ``tail.py``, wall seconds; the
built-in engine runs it twice, because it records graphs when it first needs them, and the second counts. *cost of the
adapter*: vLLM's own loop and ours over the same engine, in turns. *pull*: new weights with 64 sequences in flight,
beside one copy of as many bytes from pinned memory. *alone* is vLLM in the configuration that was fastest on this card:
in the process, asynchronous scheduling, torch.compile and full CUDA graphs, no prefix cache, raw log-probabilities,
outputs once at the end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench import kept
from bench.gpu.lab import Results
from bench.gpu.tail import mix
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.options import EngineOptions
from staleflow.rollout.shapes import SHAPES, write
from staleflow.servers.weights.parameter_server import LocalParameterServer

MOST_S = 400
"""Time limit of a side."""


@dataclass(frozen=True)
class Sizes:
    device: str = "cuda"
    dtype: str = "bfloat16"
    shape: str = "qwen-1.5b"
    steady: tuple[tuple[int, int], ...] = ((64, 2048), (256, 2048), (1, 512), (2, 512), (4, 512), (8, 512))
    rounds: tuple[int, ...] = (64, 256)
    mix: tuple[int, int, int, int] = (512, 256, 512, 8192)
    """Requests, prompt, mean and longest response."""
    kv_tokens: int = 720_896
    most: int = 256
    warm: int = 20
    steps: int = 100


SMOKE = Sizes("cpu", "float32", "tiny", ((2, 32),), (2,), (4, 8, 6, 16), 4096, 4, 1, 3)


class Driven:
    """A side that is an engine of ours."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._count = 0

    def submit(self, prompts: list[list[int]], lengths: list[int]) -> None:
        self._count += 1
        self.engine.submit(
            [
                Request(f"{self._count}/{at}", 1, prompt, sampling=Sampling(max_tokens=most))
                for at, (prompt, most) in enumerate(zip(prompts, lengths, strict=True))
            ]
        )

    def step(self) -> int:
        """How many tokens were made."""
        return self.engine.step().made

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def clear(self) -> None:
        self.engine.abort([f"{self._count}/{at}" for at in range(1024)])


class Alone:
    """vLLM by its own means."""

    def __init__(self, folder: str, sizes: Sizes) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        from vllm import LLM

        cpu = sizes.device == "cpu"
        self.engine = LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", dtype=sizes.dtype, enable_prefix_caching=False,
            max_model_len=512 if cpu else sizes.mix[1] + sizes.mix[3] + 512, max_num_seqs=sizes.most,
            max_num_batched_tokens=512 if cpu else 16_384, kv_cache_memory_bytes=(1 << 26) if cpu else (24 << 30),
            gpu_memory_utilization=0.1, disable_log_stats=True, enforce_eager=cpu,
        ).llm_engine  # fmt: skip
        self._count = self._total = 0

    def submit(self, prompts: list[list[int]], lengths: list[int]) -> None:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._count += 1
        for at, (prompt, most) in enumerate(zip(prompts, lengths, strict=True)):
            sampling = SamplingParams(
                max_tokens=most, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            self.engine.add_request(f"{self._count}/{at}", TokensPrompt(prompt_token_ids=prompt), sampling)
        self._total = 0

    def step(self) -> int:
        before = self._total
        self.engine.step()
        states = self.engine.output_processor.request_states.values()
        self._total = sum(each.detokenizer.num_output_tokens() for each in states)
        return self._total - before

    def run(self) -> None:
        while self.busy:
            self.engine.step()

    @property
    def busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def clear(self) -> None:
        self.engine.abort_request(list(self.engine.output_processor.request_states), internal=True)
        while self.busy:
            self.engine.step()

    def described(self) -> dict[str, Any]:
        config = self.engine.vllm_config
        return {
            "async_scheduling": config.scheduler_config.async_scheduling,
            "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }


def options_of(sizes: Sizes) -> EngineOptions:
    return EngineOptions(
        kv_tokens=sizes.kv_tokens, max_running=sizes.most, prefill_tokens=64 if sizes.device == "cpu" else 16_384 - 256,
        dtype=sizes.dtype, device=sizes.device, weights="random",  # type: ignore[arg-type]
    )  # fmt: skip


def started(name: str, folder: str, sizes: Sizes) -> Any:
    if name == "alone":
        return Alone(folder, sizes)
    if name == "built-in":
        from staleflow.rollout.builtin import TorchEngine

        return Driven(TorchEngine(folder, options_of(sizes)))
    if name != "adapter":
        raise ValueError(f"{name} is not a side: give built-in, adapter or alone")
    from staleflow.rollout.vllm.engine import VllmEngine
    from staleflow.rollout.vllm.start import start

    return Driven(VllmEngine(start(folder, options_of(sizes), {}), folder, options_of(sizes), version=0))


def seconds(call: Callable[[], object], device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def steady(side: Any, sizes: Sizes, running: int, context: int) -> float:
    """Milliseconds of a step, by the tokens that it makes."""
    vocabulary = SHAPES[sizes.shape]["vocab_size"]
    prompts = [[(at * 7919 + 31 * each) % vocabulary for each in range(context)] for at in range(running)]
    side.submit(prompts, [400] * running)
    for _ in range(running + 200):
        if side.step() == running:
            break
    else:
        raise RuntimeError(f"{running} sequences never decode together")
    for _ in range(sizes.warm):
        side.step()
    made = 0

    def steps() -> None:
        nonlocal made
        for _ in range(sizes.steps):
            made += side.step()

    took = seconds(steps, sizes.device)
    side.clear()
    return 1e3 * took * running / made


def skewed(side: Any, sizes: Sizes) -> float:
    prompts, lengths = mix(SHAPES[sizes.shape]["vocab_size"], *sizes.mix)

    def run() -> None:
        side.submit(prompts, lengths)
        while side.busy:
            side.engine.step()

    return seconds(run, sizes.device)


def adapter(side: Driven, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Tokens per second of vLLM's own loop and of ours."""
    from bench.gpu.vllm_adapter import bare, ours

    found: dict[str, dict[str, float]] = {}
    llm = side.engine._llm
    for sequences in sizes.rounds:
        rounds = [(bare(llm, sequences, turn), ours(llm, side.engine, sequences, turn)) for turn in range(4)]
        own, adapted = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
        found[str(sequences)] = {"vllm": own, "adapter": adapted}
    return found


def pulled(side: Driven, sizes: Sizes, folder: str) -> dict[str, float]:
    """Milliseconds that a pull keeps the engine from decoding, and those of a copy of as many bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    kind = getattr(torch, sizes.dtype)
    tensors = {name: torch.empty(each.shape, dtype=kind) for name, each in model.named_parameters()}
    size = sum(each.nbytes for each in tensors.values())
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=sizes.device == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=sizes.device)
    copies = [seconds(lambda: target.copy_(pinned), sizes.device) for _ in range(5)]
    running = min(64, sizes.most)
    side.submit([[1] * 64] * running, [400] * running)
    taken: list[float] = []
    with (
        tempfile.TemporaryDirectory() as registry,
        LocalParameterServer.create("engines", registry=registry, dtype=kind) as store,
    ):
        for version in range(1, 6):
            side.step()
            store.push(version, {name: each.fill_(version / 1024) for name, each in tensors.items()})
            taken.append(seconds(lambda at=version: side.engine.pull(store, at), sizes.device))
    side.clear()
    took, copy = (1e3 * statistics.median(each[1:]) for each in (taken, copies))
    return {"ms": took, "copy_ms": copy, "times": took / copy, "bytes": size, "first_ms": 1e3 * taken[0]}


def child(name: str, sizes: Sizes) -> None:
    """One side: start, say so, wait for a line, measure; every line is a result."""

    def say(key: str, value: Any) -> None:
        print(f"RESULT {json.dumps([key, value])}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        write(sizes.shape, folder)
        began = time.perf_counter()
        side = started(name, folder, sizes)
        say("start_s", time.perf_counter() - began)
        sys.stdin.readline()
        for running, context in sizes.steady:
            say(f"{running} x {context}, ms", steady(side, sizes, running, context))
        if name == "built-in":
            say("skewed, first time, s", skewed(side, sizes))
        say("skewed, s", skewed(side, sizes))
        if name == "alone":
            say("configuration", side.described())
            return
        if name == "adapter":
            say("cost of the adapter, tokens/s", adapter(side, sizes))
        say("pull", pulled(side, sizes, folder))


def sides(smoke: bool, wanted: list[str], log: Path) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).resolve()), *(["--smoke"] if smoke else []), "--side"]
    logs = {name: (log / f"{name}.log").open("w") for name in wanted}
    pipe = subprocess.PIPE
    processes = {
        name: subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, stderr=logs[name], text=True)
        for name in wanted
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in wanted}

    def heard(name: str) -> bool:
        for line in processes[name].stdout or ():
            if line.startswith("RESULT "):
                key, value = json.loads(line.removeprefix("RESULT "))
                found[name][key] = value
                print(f"{name}: {key}: {value}", flush=True)
                return True
        return False

    try:
        alive = [name for name in wanted if heard(name)]
        for name in alive:
            stdin = processes[name].stdin
            assert stdin is not None
            stdin.write("go\n")
            stdin.flush()
            while heard(name):
                pass
            processes[name].wait(MOST_S)
    finally:
        for name, process in processes.items():
            process.kill()
            process.wait()
            logs[name].close()
            if process.returncode:
                said = (log / f"{name}.log").read_text().strip().splitlines()
                found[name]["failed"] = " | ".join(said[-3:])[-600:]
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=kept.to_continue, help="file of results, read to resume")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for what the sides say")
    parser.add_argument("--only", nargs="+", default=["adapter", "alone", "built-in"])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.side:
        child(given.side, SMOKE if given.smoke else Sizes())
        return {}
    results = Results(given.output)
    results.head()
    there = [name for name in given.only if name == "built-in" or find_spec("vllm")]
    missing = [name for name in there if name not in results.found]
    if missing:
        for name, row in sides(given.smoke, missing, given.logs).items():
            if "failed" in row:
                print(f"{name} failed: {row['failed']}", file=sys.stderr)
            else:
                results.measure(name, lambda row=row: row)
    return results.found


if __name__ == "__main__":
    main()
