"""Shapes of well-known models, for measurements without a checkpoint: a config.json and no weights.

with tempfile.TemporaryDirectory() as folder:
    write("qwen-1.5b", folder)
    engine = TorchEngine(folder, EngineOptions(weights="random"))
"""

import json
from pathlib import Path
from typing import Any


def llama(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


def _qwen2(*sizes: int) -> dict[str, Any]:
    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6}
    return llama(*sizes) | qwen2 | {"max_position_embeddings": 32_768}


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": llama(128, 384, 4, 4, 2, 512),
    "smollm-135m": llama(576, 1536, 30, 9, 3, 49_152),
    "qwen-0.5b": _qwen2(896, 4864, 24, 14, 2, 151_936),
    "qwen-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151_936),
}
"""``tiny`` has about a million parameters; the others are those of SmolLM2-135M and of Qwen2.5."""

LARGE: dict[str, dict[str, Any]] = {
    name: shape | {"tie_word_embeddings": False}
    for name, shape in {
        "Qwen2.5-7B": _qwen2(3584, 18_944, 28, 28, 4, 152_064),
        "Qwen2.5-14B": _qwen2(5120, 13_824, 48, 40, 8, 152_064),
        "Qwen2.5-32B": _qwen2(5120, 27_648, 64, 40, 8, 152_064),
        "Llama-3.1-8B": llama(4096, 14_336, 32, 32, 8, 128_256) | {"max_position_embeddings": 131_072},
        "Llama-3.1-70B": llama(8192, 28_672, 80, 64, 8, 128_256) | {"max_position_embeddings": 131_072},
    }.items()
}
"""Models that can be planned with by name, without a folder."""


def write(shape: str | dict[str, Any], folder: str | Path) -> None:
    """Write the config.json of one of ``SHAPES`` by its name, or of another shape."""
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape] if isinstance(shape, str) else shape))
