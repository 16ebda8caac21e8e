"""A workload with random weights and lengths as skewed as reasoning's: what a run of any shape can be given.

    data.source=bench.gpu.skewed:Prompts reward.function=bench.gpu.skewed:reward rollout.engine=bench.gpu.skewed:engine

Random weights end a response nowhere, so the engine is the built-in one (or vLLM: ``vllm_engine``) with a limit for
each trajectory. The limit is a function of its name, so that every bound meets the same lengths: lognormal with a
coefficient of variation of 1.5, cut at ``longest``. Half of the rewards are 1, by a hash of the response, so that
groups teach.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from staleflow.rollout.builtin import TorchEngine
from staleflow.rollout.engine import Engine, Request
from staleflow.rollout.options import EngineOptions
from staleflow.rollout.shapes import SHAPES, write
from staleflow.tasks.task import Problem, Split, digest

VARIATION = 1.5


def length(name: str, mean: int, longest: int) -> int:
    """Tokens of a response, by the name of its trajectory."""
    sigma = math.sqrt(math.log(1 + VARIATION**2))
    drawn = NormalDist(math.log(mean) - sigma**2 / 2, sigma).inv_cdf((digest("length", name) + 0.5) / 2**64)
    return max(1, min(longest, round(math.exp(drawn))))


class SkewedEngine(TorchEngine):
    def __init__(self, folder: str | Path, options: EngineOptions, mean: int, longest: int) -> None:
        super().__init__(folder, options, version=-1)
        self._mean, self._longest = mean, longest

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(limited(requests, self._mean, self._longest))


def limited(requests: Sequence[Request], mean: int, longest: int) -> list[Request]:
    def one(request: Request) -> Request:
        trained = request.name.startswith("p")  # an evaluation's are one token
        tokens = length(request.name, mean, longest) if trained else 1
        return replace(request, sampling=replace(request.sampling, max_tokens=tokens, stop_tokens=()))

    return [one(each) for each in requests]


def engine(model_folder: str | Path, options: EngineOptions, mean: int = 256, longest: int = 4096) -> SkewedEngine:
    made = SkewedEngine(model_folder, options, mean, longest)
    made.prepare()
    return made


def vllm_engine(model_folder: str | Path, options: EngineOptions, mean: int = 256, longest: int = 4096) -> Engine:
    from staleflow.rollout.vllm.engine import VllmEngine
    from staleflow.rollout.vllm.start import start

    class SkewedVllm(VllmEngine):
        def submit(self, requests: Sequence[Request]) -> None:
            super().submit(limited(requests, mean, longest))

    return SkewedVllm(start(model_folder, options, {}), model_folder, options, version=-1)


class Prompts:
    """Endless prompts of random tokens."""

    def __init__(self, tokens: int = 128, vocabulary: int = 512) -> None:
        self._tokens, self._vocabulary = tokens, vocabulary

    def problem(self, index: int, split: Split = "train") -> Problem:
        first = digest(split, index)
        return Problem(tuple((first + 7919 * at) % self._vocabulary for at in range(self._tokens)), {})

    def verify(self, problem: Problem, tokens: Sequence[int]) -> float:  # noqa: ARG002
        return float(sum(tokens) % 2)


def reward(problem: Problem, response: Any) -> float:  # noqa: ARG001
    return float(sum(response.tokens) % 2)


def model(shape: str, folder: Path) -> Path:
    """A folder with random weights of this shape and a tokenizer that knows no word; made if it is not there."""
    if not (folder / "tokenizer.json").is_file():
        from transformers import AutoConfig, AutoModelForCausalLM

        folder.mkdir(parents=True, exist_ok=True)
        write(shape, folder)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        made.save_pretrained(folder)
        words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}
        (folder / "tokenizer.json").write_text(json.dumps(words))
    return folder


def words(shape: str, folder: Path, mean: int, longest: int, prompt: int, engine: str = "engine") -> list[str]:
    """The settings of a run with this workload; ``engine`` is one of the functions above."""
    arguments = f"{{tokens: {prompt}, vocabulary: {SHAPES[shape]['vocab_size']}}}"
    return [
        f"model={model(shape, folder)}",
        "data.source=bench.gpu.skewed:Prompts",
        f"data.arguments={arguments}",
        "data.chat=false",
        f"data.max_prompt_tokens={prompt}",
        "reward.function=bench.gpu.skewed:reward",
        f"rollout.engine=bench.gpu.skewed:{engine}",
        f"rollout.engine_arguments={{mean: {mean}, longest: {longest}}}",
        f"rollout.max_tokens={longest}",
    ]
