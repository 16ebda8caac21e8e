"""The sizes of a model from its ``config.json``, without loading anything.

sizes = sizes_of(config)        # ConfigError if there is no such model
sizes.parameters, sizes.kv_bytes(2)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.model_json import read_json, unsupported
from staleflow.rollout.shapes import SHAPES
from staleflow.tasks import calculator
from staleflow.tasks.adder import VOCABULARY, Shape
from staleflow.tasks.calculator import SHAPE
from staleflow.tasks.hub import hub_folder
from staleflow.tasks.options import CALCULATOR, EMBEDDED, SMOLLM, is_hub_name


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    """Tokens of the longest sequence."""
    tied: bool
    family: str

    @property
    def layer_parameters(self) -> int:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * wide + 2 * narrow)
        biases = wide + 2 * narrow if self.family == "qwen2" else 2 * self.head_dim if self.family == "qwen3" else 0
        return attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    def adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of LoRA adapters."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow, "o_proj": wide}
        other = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.intermediate)
        return self.layers * rank * sum(self.hidden + (ends | other).get(each, self.hidden) for each in targets)

    def kv_bytes(self, item: int) -> int:
        """KV memory of one token, with numbers of ``item`` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * item

    def activation_bytes(self, recomputed: bool, on_gpu: bool = False) -> int:
        """About what training keeps for one token of a micro-batch: layers, and logits with their gradient.

        On a GPU layers keep little, in bfloat16, and logits are never kept as a whole.
        """
        if on_gpu:
            layer = 2 * (2 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim + 2 * self.intermediate)
            return self.layers * 4 * self.hidden + layer if recomputed else self.layers * layer
        layer = 8 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim + 4 * self.intermediate
        layers = self.layers * self.hidden + layer if recomputed else self.layers * layer
        return 4 * (layers + 3 * self.vocabulary)


def sizes_of(config: Config) -> Sizes:
    if config.model in EMBEDDED:
        shape, words = (SHAPE, calculator.VOCABULARY) if config.model == CALCULATOR else (Shape(), VOCABULARY)
        head = shape.hidden // shape.heads
        widths = (shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.heads, head)
        return Sizes(*widths, len(words), shape.positions, tied=False, family="llama")
    if config.model == SMOLLM:
        return read_sizes("smollm2-135m", SHAPES["smollm-135m"])
    hub = is_hub_name(config.model)
    path = (hub_folder(config.model, weights=False) if hub else Path(config.model)) / "config.json"
    if not path.parent.is_dir():
        raise ConfigError(
            f"model={config.model}: no such folder: give adder, calculator, smollm2-135m, a folder in Hugging Face "
            "format, or OWNER/NAME of a model on the Hugging Face hub"
        )
    if not path.is_file():
        raise ConfigError(f"model={config.model}: the folder has no config.json: give one in Hugging Face format")
    found = read_json(path)
    if config.rollout.engine == "builtin" and (problem := unsupported(path, found.get("model_type"))) is not None:
        raise ConfigError(problem)
    return read_sizes(str(path), found)


def read_sizes(where: str, found: dict[str, Any]) -> Sizes:
    """``found``: what a ``config.json`` holds."""

    def number(*names: str) -> int:
        for name in names:
            value = found.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise ConfigError(f"{where}: {names[0]} is missing or not a number above 0: write the model again")

    heads = number("num_attention_heads")
    return Sizes(
        layers=number("num_hidden_layers"),
        hidden=number("hidden_size"),
        intermediate=number("intermediate_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_attention_heads"),
        head_dim=found.get("head_dim") or number("hidden_size") // heads,
        vocabulary=number("vocab_size"),
        positions=number("max_position_embeddings"),
        tied=bool(found.get("tie_word_embeddings", False)),
        family=str(found.get("model_type")),
    )
