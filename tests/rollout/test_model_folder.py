"""A configuration that is read without transformers is read as transformers reads it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from staleflow.rollout import model_folder
from staleflow.rollout.engine import EngineError
from staleflow.rollout.model_folder import COUNTS, SWITCHES, ModelConfig, plain, read_config
from tests.tiny_models import save_tiny

CLASSES: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
NAMES = (
    *COUNTS, "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window",
    "layer_types", "rms_norm_eps", "hidden_act", "rope_parameters", "rope_theta", "rope_scaling", "max_window_layers",
)  # fmt: skip
ODD = (
    None, 0, -1, 3, 64, True, False, 1e-5, 1e6, "silu", "gelu", [], ["full_attention"] * 2, ["sliding_attention"] * 2,
    {}, {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
)  # fmt: skip


@some.composite
def files(draw: some.DrawFn) -> dict[str, Any]:
    """As transformers writes it; often with something left out or changed, or as earlier releases wrote it."""
    family = draw(some.sampled_from(sorted(CLASSES)))
    heads = draw(some.sampled_from([2, 4]))
    sizes: dict[str, Any] = {
        "hidden_size": 16 * heads,
        "intermediate_size": draw(some.integers(8, 64)),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(some.sampled_from([1, 2])),
        "vocab_size": draw(some.integers(10, 500)),
        "max_position_embeddings": draw(some.integers(16, 4096)),
        "tie_word_embeddings": draw(some.booleans()),
    }
    if family == "mistral":
        sizes["sliding_window"] = draw(some.sampled_from([None, None, 128]))
    if family == "qwen3":
        sizes["head_dim"] = draw(some.sampled_from([16, 32]))
    found = json.loads(CLASSES[family](**sizes).to_json_string(use_diff=False))
    if draw(some.booleans()):
        found["rope_theta"] = found.pop("rope_parameters")["rope_theta"]
    for name in draw(some.lists(some.sampled_from(NAMES), max_size=2)):
        if draw(some.booleans()):
            found.pop(name, None)
        else:
            found[name] = draw(some.sampled_from(ODD))
    return found


def read(found: dict[str, Any], folder: Path) -> ModelConfig | None:
    (folder / "config.json").write_text(json.dumps(found))
    try:
        return read_config(folder)
    except EngineError:
        return None


@given(files())
def test_what_is_read_without_transformers_is_what_it_reads(
    tmp_path_factory: pytest.TempPathFactory, found: dict[str, Any]
) -> None:
    if plain(found) is None:
        return
    folder = tmp_path_factory.mktemp("model")
    ours = read(found, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "plain", lambda _: None)
        theirs = read(found, folder)
    if theirs is None:
        return  # it also refuses what the engine does not use
    assert ours is not None
    assert ours._replace(source=None) == theirs._replace(source=None)
    assert ours.source.rope_parameters == theirs.source.rope_parameters


@pytest.mark.parametrize("family", sorted(CLASSES))
def test_what_transformers_writes_is_read_without_it(family: str) -> None:
    found = json.loads(CLASSES[family](sliding_window=None).to_json_string(use_diff=False))
    assert plain(found) is not None
    for name in (*COUNTS, *SWITCHES[family], "rms_norm_eps", "hidden_act", "rope_parameters"):
        assert plain({key: value for key, value in found.items() if key != name}) is None, name


def test_an_engine_of_a_common_model_does_not_wait_for_transformers(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import staleflow.servers.weights.parameter_server, staleflow.workers.rollout\n"
        "from staleflow.rollout.builtin import TorchEngine\n"
        "from staleflow.tasks.opening import stop_tokens\n"
        "stop_tokens(Path(sys.argv[1]))\n"
        "TorchEngine(sys.argv[1])\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(save_tiny(tmp_path))], check=True)
