"""A model folder in Hugging Face format: its configuration, checked, and its tensors. Never touches the network.

config = read_config("models/tiny")
for name, tensor in read_tensors("models/tiny"): ...
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from staleflow.errors import line_of
from staleflow.model_json import read_json, unsupported, windowed
from staleflow.rollout.attention import Geometry
from staleflow.rollout.engine import EngineError

ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not change with the length."""
COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
SWITCHES = {
    "llama": ("tie_word_embeddings", "attention_bias", "mlp_bias"),
    "mistral": ("tie_word_embeddings",),
    "qwen2": ("tie_word_embeddings", "use_sliding_window"),
    "qwen3": ("tie_word_embeddings", "use_sliding_window", "attention_bias"),
}
"""What a file must say itself to be read without transformers, which knows what is meant where it is silent."""


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
    """The configuration, as transformers reads it."""


def read_config(folder: str | Path) -> ModelConfig:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise EngineError(f"{path} is missing: give the folder of a model in Hugging Face format")
    found = read_json(path)
    family = found.get("model_type")
    if (problem := unsupported(path, family)) is not None:
        raise EngineError(problem)
    if (source := plain(found)) is None:
        source = _by_transformers(path)
    return _checked(path, str(family), source)


def plain(found: dict[str, Any]) -> Any | None:
    """What transformers would read, if the file is of the common kind and leaves nothing to be known; else None.
    It takes a second to load transformers, which every instance would spend at its start."""
    family = str(found.get("model_type"))
    rope, theta = found.get("rope_parameters"), found.get("rope_theta")
    if rope is None and theta is not None:  # as it was written before transformers 5
        rope = {"rope_type": "default", "rope_theta": theta}
    sizes = [found.get(name) for name in COUNTS]
    head_dim = found.get("head_dim")
    if family == "qwen3" or head_dim is not None:
        sizes.append(head_dim)
    said = (
        all(type(size) is int and size > 0 for size in sizes)
        and (head_dim is not None or found["hidden_size"] % found["num_attention_heads"] == 0)
        and all(type(found.get(name)) is bool for name in SWITCHES[family])
        and type(found.get("rms_norm_eps")) is float
        and type(found.get("hidden_act")) is str
        and isinstance(rope, dict)
        and set(rope) == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        and type(rope["rope_theta"]) in (int, float)
        and theta in (None, rope["rope_theta"])
        and not found.get("rope_scaling")
        and found.get("partial_rotary_factor", 1.0) == 1.0
        and not found.get("use_sliding_window")
        and isinstance(found.get("layer_types") or [], list)
        and "sliding_attention" not in (found.get("layer_types") or [])
        and (family != "mistral" or ("sliding_window" in found and found["sliding_window"] is None))
    )
    return SimpleNamespace(**{"head_dim": None} | found | {"rope_parameters": rope}) if said else None


def _by_transformers(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds; all mean that the file cannot be used
        raise EngineError(f"{path} cannot be read by transformers ({line_of(error)}): write the model again") from None


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
