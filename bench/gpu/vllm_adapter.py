# pyright: reportMissingImports=false
"""What our adapter costs vLLM: the same engine stepped by vLLM's own loop and by ours, in turns; and what a pull takes.

    python bench/gpu/vllm_adapter.py --device cuda --dtype bfloat16 --shape qwen-1.5b       # on a GPU
    python bench/gpu/vllm_adapter.py --shape tiny --sequences 16 64                         # on a CPU, in .venv-vllm
    python bench/gpu/vllm_adapter.py --json

Random weights; prompts of 64 tokens, 128 tokens each, temperature 1, with log-probabilities in both loops. A pull is
compared with one copy of the same bytes to the device. Figures are medians of the rounds. On a CPU time is that of the
process, because other work would change the other by more than what is to be measured; and vLLM's own loop has an
engine of its own, because ours changes how small models compute there (``rollout/vllm/cpu.py``).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench import amounts
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.options import EngineOptions
from staleflow.rollout.shapes import SHAPES, write
from staleflow.rollout.vllm.engine import VllmEngine
from staleflow.rollout.vllm.start import start
from staleflow.servers.weights.parameter_server import LocalParameterServer

from vllm.inputs import TokensPrompt  # isort: skip
from vllm.sampling_params import RequestOutputKind, SamplingParams  # isort: skip

PROMPT, MOST = 64, 128
clock = time.perf_counter


def prompt_of(at: int, turn: int) -> list[int]:
    return [2 + (at * 7 + turn * 13 + each * each) % 50 for each in range(PROMPT)]


def bare(llm: Any, sequences: int, turn: int) -> float:
    """Tokens per second of vLLM's own loop."""
    llm.reset_prefix_cache()
    began = clock()
    for at in range(sequences):
        sampling = SamplingParams(
            max_tokens=MOST,
            temperature=1.0,
            seed=at,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.add_request(f"{turn}/{at}", TokensPrompt(prompt_token_ids=prompt_of(at, turn)), sampling)
    while llm.has_unfinished_requests():
        llm.step()
    return sequences * MOST / (clock() - began)


def ours(llm: Any, engine: VllmEngine, sequences: int, turn: int) -> float:
    llm.reset_prefix_cache()
    began = clock()
    sampling = Sampling(max_tokens=MOST)
    engine.submit([Request(f"{turn}/{at}", 1, prompt_of(at, turn), sampling=sampling) for at in range(sequences)])
    made = 0
    while engine.busy:
        made += engine.step().made
    assert made == sequences * MOST
    return made / (clock() - began)


def pulls(engine: VllmEngine, folder: str, dtype: torch.dtype, device: str, rounds: int) -> tuple[float, float, int]:
    """Seconds of a pull with requests in flight, of one copy of the same bytes, and those bytes."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    copies = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    engine.submit([Request(f"p{at}", 1, prompt_of(at, 0), sampling=Sampling(max_tokens=10_000)) for at in range(8)])
    engine.step()
    pulled: list[float] = []
    copied: list[float] = []
    with tempfile.TemporaryDirectory() as registry:
        store = LocalParameterServer.create("vllm-bench", registry=registry, dtype=dtype)
        for version in range(1, rounds + 2):
            store.push(version, {name: tensor.add_(1e-6) for name, tensor in tensors.items()})
            began = clock()
            store.forget()
            store.pull(copies, version)
            copied.append(clock() - began)
            began = clock()
            engine.pull(store, version)
            pulled.append(clock() - began)
            engine.step()
        store.close()
    engine.abort([f"p{at}" for at in range(8)])
    return statistics.median(pulled[1:]), statistics.median(copied[1:]), sum(each.nbytes for each in tensors.values())


def main() -> None:
    global clock
    parser = argparse.ArgumentParser(description="What our adapter costs vLLM.")
    parser.add_argument("--shape", default="tiny", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--sequences", type=amounts.count, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=amounts.count, default=5)
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    clock = time.process_time if wanted.device == "cpu" else time.perf_counter
    most = max(wanted.sequences)
    with tempfile.TemporaryDirectory() as folder:
        write(wanted.shape, folder)
        options = EngineOptions(
            kv_tokens=most * (PROMPT + MOST + 32),
            max_running=most,
            prefill_tokens=4096,
            dtype=wanted.dtype,
            device=wanted.device,
            weights="random",
            threads=1,
        )
        llm = start(Path(folder), options, {})
        own = start(Path(folder), options, {}) if wanted.device == "cpu" else llm
        engine = VllmEngine(llm, folder, options, version=0)
        pull, copy, size = pulls(engine, folder, getattr(torch, wanted.dtype), wanted.device, wanted.rounds)
        found: dict[str, Any] = {"shape": wanted.shape, "device": wanted.device, "throughput": []}
        for sequences in wanted.sequences:
            rounds = [
                (bare(own, sequences, turn), ours(llm, engine, sequences, turn)) for turn in range(wanted.rounds + 1)
            ]
            alone, adapted = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
            found["throughput"].append({"sequences": sequences, "vllm": alone, "ours": adapted})
        found |= {"pull_s": pull, "copy_s": copy, "bytes": size}
    if wanted.json:
        print(json.dumps(found, indent=2))
        return
    for each in found["throughput"]:
        sequences, alone, adapted = each["sequences"], each["vllm"], each["ours"]
        print(f"{sequences:4} sequences: vLLM {alone:.0f} tokens/s, ours {adapted:.0f} ({adapted / alone - 1:+.1%})")
    print(f"pull of {size / 1e6:.1f} MB {1e3 * pull:.1f} ms, one copy {1e3 * copy:.1f} ms ({pull / copy:.1f}x)")


if __name__ == "__main__":
    main()
