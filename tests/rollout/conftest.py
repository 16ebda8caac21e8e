"""Tiny models with random weights in Hugging Face folders, and what transformers itself makes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Failed, Request, Result, Sampling, StepOutput

logging.disable_progress_bar()

VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama-tied-multihead": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SHAPE, "tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True})
    ),
    "llama-scaled-rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}, head_dim=16)),
}


class Tiny(NamedTuple):
    folder: Path
    model: Any

    def engine(self, version: int = 0, **options: Any) -> TorchEngine:
        defaults: dict[str, Any] = {"kv_tokens": 2048, "page_size": 8, "max_running": 16}
        return TorchEngine(self.folder, EngineOptions(**{**defaults, **options}), version)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What transformers generates."""
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].double()

    def logprobs(self, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probabilities of ``tokens`` after ``prompt`` from one forward pass over all of it."""
        every = torch.log_softmax(self.logits(prompt + tokens) / temperature, -1)
        return [every[len(prompt) - 1 + at, token].item() for at, token in enumerate(tokens)]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}


def randomise(model: Any, seed: int) -> None:
    """Weights large enough for distributions that are far from uniform."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=chance)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else 1 + 0.1 * noise)


def make(kind: str, folder: Path, seed: int = 0) -> Tiny:
    model = KINDS[kind]().eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    return Tiny(folder, model)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """``tiny(kind, seed)``: a model, made once."""
    made: dict[tuple[str, int], Tiny] = {}

    def get(kind: str = "llama", seed: int = 0) -> Tiny:
        if (kind, seed) not in made:
            made[kind, seed] = make(kind, tmp_path_factory.mktemp(kind), seed)
        return made[kind, seed]

    return get


@pytest.fixture(scope="session")
def spelling(tiny: Callable[..., Tiny], tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model whose tokens are characters: token i is chr(32 + i)."""
    base = tiny("llama")
    folder = tmp_path_factory.mktemp("spelling")
    base.model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({chr(32 + at): at for at in range(VOCABULARY)}, unk_token=" "))
    tokenizer.pre_tokenizer = Split("", "isolated")  # type: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = Fuse()  # type: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tiny(folder, base.model)


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY, (length,), generator=chance).tolist()


def greedy(count: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=count)


def resume(result: Result, original: Request, epoch: int = 2) -> Request:
    return Request(
        result.name,
        epoch,
        original.prompt,
        result.tokens,
        result.logprobs,
        result.spans,
        original.group,
        original.sampling,
    )


def drain(engine: TorchEngine, steps: int = 10_000) -> tuple[dict[str, Result], list[Failed], list[StepOutput]]:
    """Run until nothing is left: results by name, failures, and every step's output."""
    finished: dict[str, Result] = {}
    failed: list[Failed] = []
    outputs: list[StepOutput] = []
    while engine.busy:
        steps -= 1
        assert steps >= 0, "the engine does not come to an end"
        output = engine.step()
        outputs.append(output)
        finished |= {result.name: result for result in output.finished}
        failed += output.failed
    return finished, failed, outputs
