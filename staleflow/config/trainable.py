"""Whether ``training.train_only`` and ``training.lora_targets`` name anything in the model, before it is loaded."""

import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from staleflow.config.schema import Config
from staleflow.config.sizes import Sizes
from staleflow.errors import ConfigError
from staleflow.model_json import FAMILIES

LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
)
MORE = {
    "qwen2": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "qwen3": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}


def refuse_unmatched_names(config: Config, sizes: Sizes) -> None:
    """``ConfigError`` for a pattern or a matrix name that matches no parameter."""
    training = config.training
    if sizes.family not in FAMILIES or not (training.train_only or training.lora_rank):
        return
    names = [*_by_family(sizes), *_in_files(Path(config.model))]
    for pattern in training.train_only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"training.train_only: no parameter is named {pattern!r}: give a name such as {names[0]}, or a "
                "pattern such as model.layers.*"
            )
    matrices = sorted({name.split(".")[-2] for name in names if name.endswith("_proj.weight")})
    if training.lora_rank and (unknown := [each for each in training.lora_targets if each not in matrices]):
        raise ConfigError(
            f"training.lora_targets: the model has no matrix {', '.join(unknown)}: give some of {', '.join(matrices)}"
        )


def _by_family(sizes: Sizes) -> Iterator[str]:
    yield "model.embed_tokens.weight"
    for layer in range(sizes.layers):
        yield from (f"model.layers.{layer}.{name}" for name in (*LAYER, *MORE.get(sizes.family, ())))
    yield "model.norm.weight"
    if not sizes.tied:
        yield "lm_head.weight"


def _in_files(folder: Path) -> Iterator[str]:
    """Names in the heads of the safetensors files: a model may have more parameters than its family."""
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, struct.error, RecursionError), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(length, path.stat().st_size)))
            yield from (str(name) for name in head)
