"""Tiny models for vLLM, whose attention on CPUs has heads of 32 numbers and more; and a store to pull them from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from staleflow.servers.weights.parameter_server import LocalParameterServer

logging.disable_progress_bar()

VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SHAPE, tie_word_embeddings=False)),
}
"""The built-in engine runs all but the last."""
EXPERTS = (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, **MOE, tie_word_embeddings=False))


def model_of(kind: str, seed: int) -> Any:
    made, config = KINDS.get(kind, EXPERTS)
    torch.manual_seed(seed)
    model = made(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """As a trainer pushes them: tied tensors under their first name only."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalParameterServer]:
    with LocalParameterServer.create("vllm-test", registry=tmp_path) as server:
        yield server
