"""The JSON files of a model folder in Hugging Face format, read without loading anything.

read_json(folder / "config.json")["vocab_size"]
"""

import json
from pathlib import Path
from typing import Any

from staleflow.errors import ConfigError, line_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that the built-in engine runs, all of one architecture: RMSNorm, rotary positions, grouped causal attention,
SwiGLU. SmolLM and SmolLM2 are ``llama``."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({line_of(error)}): write the model again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} does not hold the settings of a model: write the model again")
    return found


def windowed(config: Any) -> bool:
    """Whether a model, by its configuration as transformers reads it, attends in a sliding window."""
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return sliding or (config.model_type == "mistral" and config.sliding_window is not None)


def unsupported(where: str | Path, family: Any) -> str | None:
    """Why the built-in engine cannot run a model of this family; None if it can."""
    if family in FAMILIES:
        return None
    return (
        f"{where}: model_type {family!r} is not supported by the built-in engine: use one of {', '.join(FAMILIES)}, or "
        "let vLLM run it by rollout.engine=vllm"
    )
