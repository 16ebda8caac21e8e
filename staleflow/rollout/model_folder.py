"""A model folder in Hugging Face format: its configuration, checked, and its tensors. Never touches the network.

config = read_config("models/tiny")
for name, tensor in read_tensors("models/tiny"): ...
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from staleflow.errors import line_of
from staleflow.model_json import read_json, unsupported, windowed
from staleflow.rollout.attention import Geometry
from staleflow.rollout.engine import EngineError

ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not change with the length."""


class ModelConfig(NamedTuple):
    family: str
    geometry: Geometry
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int
    """The longest sequence that the model was made for."""
    epsilon: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    source: Any
    """The configuration as transformers read it."""


def read_config(folder: str | Path) -> ModelConfig:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise EngineError(f"{path} is missing: give the folder of a model in Hugging Face format")
    family = read_json(path).get("model_type")
    if (problem := unsupported(path, family)) is not None:
        raise EngineError(problem)
    try:
        source: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds; all mean that the file cannot be used
        raise EngineError(f"{path} cannot be read by transformers ({line_of(error)}): write the model again") from None
    return _checked(path, str(family), source)


def _checked(path: Path, family: str, source: Any) -> ModelConfig:
    heads = source.num_attention_heads
    kv_heads = source.num_key_value_heads or heads
    head_dim = getattr(source, "head_dim", None) or source.hidden_size // heads
    if heads % kv_heads:
        raise EngineError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if source.hidden_act != "silu":
        raise EngineError(f"{path}: hidden_act {source.hidden_act!r} is not supported: only silu is")
    rope = (source.rope_parameters or {}).get("rope_type", "default")
    if rope not in ROPES:
        raise EngineError(f"{path}: rope_type {rope!r} is not supported: use one of {', '.join(ROPES)}")
    if windowed(source):
        raise EngineError(f"{path}: sliding-window attention is not supported: set sliding_window to null")
    bias = bool(getattr(source, "attention_bias", False))
    return ModelConfig(
        family=family,
        geometry=Geometry(source.num_hidden_layers, heads, kv_heads, head_dim),
        hidden=source.hidden_size,
        intermediate=source.intermediate_size,
        vocabulary=source.vocab_size,
        positions=source.max_position_embeddings,
        epsilon=source.rms_norm_eps,
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=bool(getattr(source, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(source.tie_word_embeddings),
        source=source,
    )


def read_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of ``model.safetensors`` or of the files that its index names."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        path = folder / name
        if not path.is_file():
            raise EngineError(f"{path} is missing: the engine reads weights from safetensors files")
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise EngineError(f"{path} is damaged ({error}): write the checkpoint again") from None
