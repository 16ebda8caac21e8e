"""Speed of the built-in rollout engine, against transformers in the same run.

    python bench/engine.py              # tables; some ten minutes on two cores
    python bench/engine.py --quick      # the small model only, one repeat
    python bench/engine.py --json       # the same as JSON

Sixty-four requests with random weights and prompts, drawn at temperature 1, by three engines that take turns: ours,
``generate`` on a left-padded batch, which runs until the longest request ends (only tokens that were asked for
count), and transformers' continuous batching, stopped after ``--cap`` seconds (tokens per second until then). In the
*skewed* mix lengths follow a lognormal distribution with a coefficient of variation of 1.5; in the *equal* mix all
have its mean. Figures are medians of repeats.
"""

import argparse
import inspect
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from bench import amounts
from staleflow.rollout import builtin
from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Request, Sampling

REQUESTS = 64
CV = 1.5
GRID = ((1, 128), (16, 128), (64, 128), (64, 512))
"""Running sequences and context tokens of each, for the breakdown of a step."""
TARGET_SKEWED, TARGET_EQUAL, TARGET_PULL = 4.0, 1.0, 1.2


class Shape(NamedTuple):
    name: str
    config: dict[str, Any]
    mean: int
    """Tokens that a request generates on average."""


SHAPES = (
    Shape(
        "1M",
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
        mean=128,
    ),
    Shape(
        "135M",  # the shape of SmolLM2-135M
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
        },
        mean=24,
    ),
)


class Work(NamedTuple):
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def lengths(mix: str, mean: int) -> list[int]:
    """The middle of each of 64 equal slices of the distribution, in random order: the tail is not left to chance."""
    if mix == "equal":
        return [mean] * REQUESTS
    sigma = torch.tensor(1 + CV**2).log().sqrt().item()
    slices = [NormalDist(0, sigma).inv_cdf((at + 0.5) / REQUESTS) for at in range(REQUESTS)]
    raw = [torch.tensor(value).exp().item() for value in slices]
    found = [max(1, round(value * mean * REQUESTS / sum(raw))) for value in raw]
    random.Random(0).shuffle(found)
    return found


def work(mix: str, shape: Shape, mean: int) -> Work:
    chance = random.Random(1)
    vocabulary = shape.config["vocab_size"]
    prompts = [[chance.randrange(vocabulary) for _ in range(chance.randint(16, 48))] for _ in range(REQUESTS)]
    return Work(prompts, lengths(mix, mean))


def submit(engine: TorchEngine, todo: Work) -> None:
    pairs = zip(todo.prompts, todo.lengths, strict=True)
    engine.submit([Request(f"t{at}", 1, p, sampling=Sampling(max_tokens=n)) for at, (p, n) in enumerate(pairs)])


def run_ours(engine: TorchEngine, todo: Work) -> float:
    """Tokens per second. Pages of earlier repeats are dropped, because their prefixes would be reused."""
    engine.pool.forget()
    started = time.perf_counter()
    submit(engine, todo)
    made = 0
    while engine.busy:
        made += sum(len(result.tokens) for result in engine.step().finished)
    assert made == todo.tokens
    return made / (time.perf_counter() - started)


def run_padded(model: Any, todo: Work) -> float:
    width = max(map(len, todo.prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in todo.prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in todo.prompts], device=model.device)
    longest = max(todo.lengths)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(tokens, attention_mask=mask, generation_config=sampled(longest))
    assert out.shape[1] == width + longest
    return todo.tokens / (time.perf_counter() - started)


def sampled(longest: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=longest, pad_token_id=0, eos_token_id=-1, bos_token_id=0
    )


def run_continuous(model: Any, todo: Work, cap: float) -> float:
    room = max(len(p) + n for p, n in zip(todo.prompts, todo.lengths, strict=True))
    page = 32
    known = inspect.signature(ContinuousBatchingConfig).parameters  # names differ between versions of transformers
    wanted = {
        "page_size": page,
        "block_size": page,
        "num_blocks": REQUESTS * (room // page + 2),
        "max_batch_tokens": 2048,
        "allow_block_sharing": False,
    }
    config = ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
    implementation = model.config._attn_implementation
    manager = model.init_continuous_batching(
        generation_config=sampled(max(todo.lengths)), continuous_batching_config=config
    )
    made: dict[str, int] = defaultdict(int)
    done = 0
    manager.start()
    try:
        started = time.perf_counter()
        for at, (tokens, length) in enumerate(zip(todo.prompts, todo.lengths, strict=True)):
            manager.add_request(tokens, request_id=f"t{at}", max_new_tokens=length, streaming=True)
        while done < REQUESTS and time.perf_counter() - started < cap:
            result = manager.get_result(timeout=1)
            if result is not None:
                made[result.request_id] = len(result.generated_tokens)
                done += result.is_finished()
        seconds = time.perf_counter() - started
    finally:
        manager.stop(block=True, timeout=60)
        model.set_attn_implementation(implementation)
    return sum(made.values()) / seconds


def compare(engine: TorchEngine, model: Any, todo: Work, repeats: int, cap: float) -> dict[str, Any]:
    rates: dict[str, list[float]] = defaultdict(list)
    for at in range(repeats):
        rates["ours"].append(run_ours(engine, todo))
        rates["padded"].append(run_padded(model, todo))
        if at == 0 and cap > 0:
            rates["continuous"].append(run_continuous(model, todo, cap))
    found = {name: statistics.median(values) for name, values in rates.items()}
    mean = statistics.fmean(todo.lengths)
    return {
        "mean": mean,
        "longest": max(todo.lengths),
        "cv": statistics.pstdev(todo.lengths) / mean,
        "tokens_per_s": found,
        "times_padded": found["ours"] / found["padded"],
        "times_continuous": found["ours"] / found["continuous"] if "continuous" in found else None,
    }


def fill(engine: TorchEngine, shape: Shape, running: int, context: int) -> None:
    """Leave the engine with ``running`` sequences that decode, about ``context`` tokens each."""
    chance = random.Random(2)
    vocabulary = shape.config["vocab_size"]
    for at in range(running):
        prompt = [chance.randrange(vocabulary) for _ in range(context)]
        engine.submit([Request(f"fill{at}", 1, prompt, sampling=Sampling(max_tokens=10**6))])
    while engine.step().made < running:
        pass


def breakdown(engine: TorchEngine, shape: Shape, running: int, context: int, steps: int) -> dict[str, float]:
    """Milliseconds of a decoding step by what it does, measured by wrapping the engine's parts."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[name] += time.perf_counter() - started

        return wrapped

    fill(engine, shape, running, context)
    plain = [seconds(engine.step) for _ in range(steps)]
    undo: list[tuple[Any, str, Any]] = []
    parts: list[tuple[Any, str, str]] = [
        (engine.scheduler, "plan", "schedule"),
        (engine.scheduler, "computed", "schedule"),
        (engine, "_take_in", "schedule"),
        (engine.attention, "begin", "attention"),
        (engine.attention, "attend", "attention"),
        (builtin, "draw", "sampling"),
        (engine.model, "times_head", "matmul"),
    ]
    names = ("times_qkv", "times_out", "times_gate_up", "times_down")
    parts += [(layer, name, "matmul") for layer in engine.model.layers for name in names]
    for owner, name, kind in parts:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, timed(kind, getattr(owner, name)))
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    whole = time.perf_counter() - started
    for owner, name, before in undo:
        setattr(owner, name, before)
    engine.abort([f"fill{at}" for at in range(running)])
    spent["rest"] = whole - sum(spent.values())
    result = {name: 1e3 * spent[name] / steps for name in ("schedule", "attention", "matmul", "sampling", "rest")}
    return {"running": running, "context": context, "step_ms": 1e3 * statistics.median(plain), **result}


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def pull(engine: TorchEngine, shape: Shape, repeats: int) -> dict[str, float]:
    """How long a pull keeps a busy engine from decoding, against a plain copy of the same bytes."""
    fill(engine, shape, REQUESTS, 16)
    source = {name: tensor.clone() for name, tensor in engine.model.parameters.items()}
    target = {name: tensor.clone() for name, tensor in source.items()}
    version = engine.version

    def copy(into: Any) -> int:
        for name, tensor in into.items():
            tensor.copy_(source[name])
        return version

    pulls: list[float] = []
    copies: list[float] = []
    for _ in range(repeats):
        copies.append(seconds(lambda: copy(target)))
        version += 1
        pulls.append(seconds(lambda: engine.pull(copy, 0)))
        engine.step()
    engine.abort([f"fill{at}" for at in range(REQUESTS)])
    size = sum(tensor.nbytes for tensor in source.values())
    pulled, copied = statistics.median(pulls), statistics.median(copies)
    return {"bytes": size, "pull_ms": 1e3 * pulled, "copy_ms": 1e3 * copied, "ratio": pulled / copied}


def measure(shape: Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[arguments.dtype]
    torch.manual_seed(0)
    config = LlamaConfig(**shape.config, max_position_embeddings=4096, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(config).eval()
    model = model.to(dtype)
    mean = shape.mean // 2 if arguments.quick else shape.mean
    options = EngineOptions(
        kv_tokens=REQUESTS * 640,
        max_running=REQUESTS,
        dtype=arguments.dtype,
        device=arguments.device,
        prefill_tokens=2048,
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        engine = TorchEngine(folder, options)
    model = model.to(arguments.device)
    run_ours(engine, Work([[1, 2, 3]] * 4, [4] * 4))
    repeats = 1 if arguments.quick else arguments.repeats
    mixes = {mix: compare(engine, model, work(mix, shape, mean), repeats, arguments.cap) for mix in ("skewed", "equal")}
    steps = 20 if shape.name == "1M" else 5
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mixes": mixes,
        "steps": [breakdown(engine, shape, running, context, steps) for running, context in GRID],
        "pull": pull(engine, shape, 7 if shape.name == "135M" else 31),
    }


def show(results: dict[str, Any]) -> None:
    print(f"{results['device']}, {results['threads']} thread(s), {results['dtype']}, torch {torch.__version__}")
    for name, found in results["models"].items():
        print(f"\n{name}: {found['parameters']:,} parameters, {REQUESTS} requests, tokens/s")
        heads = ("mean", "longest", "CV", "ours", "padded", "continuous", "x padded")
        print(f"{'mix':8}" + "".join(f"{head:>11}" for head in heads) + "  target")
        for mix, cell in found["mixes"].items():
            rates = cell["tokens_per_s"]
            target = TARGET_SKEWED if mix == "skewed" else TARGET_EQUAL
            values = [f"{cell['mean']:.0f}", f"{cell['longest']}", f"{cell['cv']:.2f}"]
            values += [f"{rates[name]:,.0f}" if name in rates else "-" for name in ("ours", "padded", "continuous")]
            values.append(f"{cell['times_padded']:.2f}")
            verdict = "met" if cell["times_padded"] >= target else "MISSED"
            print(f"{mix:8}" + "".join(f"{value:>11}" for value in values) + f"  >= {target:g} {verdict}")
        columns = ("step_ms", "schedule", "attention", "matmul", "sampling", "rest")
        print("milliseconds of a decoding step")
        print(f"{'running':>8}{'context':>8}" + "".join(f"{column:>11}" for column in columns))
        for cell in found["steps"]:
            values = "".join(f"{cell[column]:11.2f}" for column in columns)
            print(f"{cell['running']:8}{cell['context']:8}{values}")
        cell = found["pull"]
        print(
            f"pull {cell['pull_ms']:.1f} ms, plain copy of {cell['bytes'] / 1e6:.1f} MB {cell['copy_ms']:.1f} ms: "
            f"{cell['ratio']:.2f} x, target <= {TARGET_PULL} {'met' if cell['ratio'] <= TARGET_PULL else 'MISSED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="the small model only, half the lengths, one repeat")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=amounts.count, default=1)
    parser.add_argument("--repeats", type=amounts.count, default=3)
    parser.add_argument(
        "--cap", type=amounts.amount, default=20.0, help="seconds for continuous batching; 0 leaves it out"
    )
    parser.add_argument("--model", choices=[shape.name for shape in SHAPES], help="only this one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = {arguments.model} if arguments.model else {"1M"} if arguments.quick else {shape.name for shape in SHAPES}
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    results = {
        "device": device,
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "torch": torch.__version__,
        "models": {shape.name: measure(shape, arguments) for shape in SHAPES if shape.name in wanted},
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
