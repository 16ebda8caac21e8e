"""Whole runs with vLLM, of models that the built-in engine refuses: real processes, a few steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from staleflow.config import load
from staleflow.config.checks import check
from staleflow.errors import ConfigError
from staleflow.observe.metrics import read_metrics
from staleflow.tasks import adder
from staleflow.tasks.base_model import tokenizer
from tests.runtime.local.test_run import configured, run_once
from tests.vllm.conftest import EXPERTS, KINDS

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def save(kind: tuple[Any, Any], folder: Path) -> Path:
    made, config = kind
    torch.manual_seed(0)
    own = {"vocab_size": len(adder.VOCABULARY), "pad_token_id": adder.PAD, "eos_token_id": adder.END}
    made(type(config)(**(config.to_dict() | own))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [KINDS["phi3"], EXPERTS], ids=["phi3", "experts"])
def test_a_model_that_the_built_in_engine_refuses_is_trained(kind: tuple[Any, Any], tmp_path: Path) -> None:
    model = save(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match="let vLLM run it"):
        check(configured(model, tmp_path))
    config = configured(
        model, tmp_path, "rollout.engine=vllm", "steps=3", "staleness=1", "evaluation.every=2", "rollout.instances=1"
    )
    check(config)
    summary, directory = run_once(config, model)
    assert summary["violations"] == 0
    rows = read_metrics(directory.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (directory.checkpoints / "best" / "model.safetensors").is_file()
    load(str(directory.config_file), [])


def test_adapters_are_merged_at_each_push_and_trained(tmp_path: Path) -> None:
    """LoRA: vLLM pulls the sum of base and adapters under the names of the base model, as the built-in engine does."""
    model = save(KINDS["qwen3, tied"], tmp_path / "model")
    config = configured(
        model, tmp_path, "rollout.engine=vllm", "steps=3", "rollout.instances=1", "training.lora_rank=4"
    )
    check(config)
    summary, directory = run_once(config, model)
    assert summary["violations"] == 0
    rows = read_metrics(directory.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2]
    # At bound 0 the engine decodes with the weights that are trained next: if it had others, they would differ.
    assert all(row["logprob_kl"] < 1e-6 for row in rows)
    (adapter,) = directory.checkpoints.glob("step-*/adapter/adapter_model.safetensors")
    assert any(tensor.abs().max() > 1e-3 for name, tensor in load_file(adapter).items() if "lora_B" in name)
