"""What is trained and what is pushed: adapters, frozen parameters, merged weights under Hugging Face names."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from staleflow.rollout.model import Model
from staleflow.rollout.model_folder import read_config
from staleflow.training.adapters import adapters, adapters_off
from staleflow.training.build import build
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.training.test_trainer import base, groups_of

__all__ = ["base"]

LORA = TrainerOptions(0, lora_rank=2, learning_rate=1e-2)
TOKENS = torch.tensor([[1, 2, 3, 4]])


def stepped(model: Any, options: TrainerOptions) -> Trainer:
    trainer = Trainer(copy.deepcopy(model), options)
    trainer.feed(0, groups_of(3, 4))
    trainer.finish(0)
    return trainer


def tiny(tied: bool) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 12}
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, **shape)
    return LlamaForCausalLM(config)


def test_lora_trains_adapters_and_nothing_else(base: Any) -> None:
    trainer = stepped(base, LORA)
    assert len(trainer.parameters) == 2 * 7 * 2, "A and B of seven matrices in two layers"
    found = dict(trainer.model.named_parameters())
    for name, tensor in base.named_parameters():
        mine = found[name] if name in found else found[name.replace(".weight", ".base_layer.weight")]
        assert torch.equal(mine, tensor)
    assert any(tensor.abs().max() > 0 for name, tensor in adapters(trainer.model).items() if "lora_B" in name)


def test_merged_weights_are_the_adapted_model_and_merging_changes_nothing(base: Any) -> None:
    trainer = stepped(base, LORA)
    before = trainer.model(TOKENS).logits
    plain = copy.deepcopy(base)
    assert plain.load_state_dict(trainer.weights())
    assert torch.allclose(plain(TOKENS).logits, before, atol=1e-9)
    assert torch.equal(trainer.model(TOKENS).logits, before)
    assert not torch.allclose(base(TOKENS).logits, before, atol=1e-4)


def test_without_its_adapters_a_model_is_what_it_was(base: Any) -> None:
    trainer = stepped(base, LORA)
    with adapters_off(trainer.model):
        assert torch.equal(trainer.model(TOKENS).logits, base(TOKENS).logits)
    assert all(each.requires_grad for each in trainer.parameters)


def test_adapters_begin_the_same_whatever_was_drawn_before(base: Any) -> None:
    torch.manual_seed(5)
    one = Trainer(copy.deepcopy(base), LORA)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn), "and draw nothing from others"
    other = Trainer(copy.deepcopy(base), LORA)
    assert all(map(torch.equal, one.parameters, other.parameters))


@pytest.mark.parametrize("options", [TrainerOptions(0), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_have_the_names_of_the_file_and_fit_the_engine(tmp_path: Path, tied: bool, options: Any) -> None:
    model = tiny(tied)
    model.save_pretrained(tmp_path)
    trainer = Trainer(model, options)
    weights = trainer.weights()
    assert weights.keys() == load_file(tmp_path / "model.safetensors").keys()
    engine = Model(read_config(tmp_path), torch.float32)
    engine.load(weights.items())
    assert engine.parameters.keys() == weights.keys()


def test_only_parameters_that_patterns_name_are_trained(base: Any) -> None:
    trainer = stepped(base, TrainerOptions(0, train_only=("model.layers.1.mlp.*", "lm_head.weight"), learning_rate=0.1))
    moved = {
        name
        for name, each in trainer.model.named_parameters()
        if not torch.equal(each, dict(base.named_parameters())[name])
    }
    assert moved == {
        "lm_head.weight",
        *(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


def test_names_that_are_not_there_are_refused(base: Any) -> None:
    with pytest.raises(ValueError, match=r"train_only: no parameter is named 'layers\.9'"):
        Trainer(copy.deepcopy(base), TrainerOptions(0, train_only=("layers.9",)))
    with pytest.raises(ValueError, match=r"the model has no matrix c_attn: use some of down_proj"):
        Trainer(copy.deepcopy(base), TrainerOptions(0, lora_rank=2, lora_targets=("c_attn",)))


@pytest.mark.parametrize("lora", [0, 2])
def test_activation_checkpointing_gives_the_same_gradients(base: Any, lora: int) -> None:
    gradients = []
    for on in (False, True):
        options = TrainerOptions(0, lora_rank=lora, entropy_coefficient=0.1, activation_checkpointing=on)
        trainer = Trainer(copy.deepcopy(base), options)
        assert trainer.model.is_gradient_checkpointing == on
        trainer.feed(0, groups_of(2, 3))
        gradients.append([each.grad for each in trainer.parameters])
    assert all(map(torch.equal, *gradients))


# Building


def test_a_trainer_is_built_from_a_folder_in_single_precision(tmp_path: Path, capfd: Any) -> None:
    tiny(True).bfloat16().save_pretrained(tmp_path)
    capfd.readouterr()
    options = TrainerOptions(0, "gae", kl_coefficient=0.1, lora_rank=2, activation_checkpointing=True)
    trainer = build(tmp_path, options)
    assert capfd.readouterr() == ("", ""), "no progress bars"
    assert trainer.version == 0
    assert {each.dtype for each in trainer.weights().values()} == {torch.float32}
    trainer.feed(0, groups_of(2, 3))
    assert trainer.finish(0).updates == 1
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with adapters_off(trainer.model):
        assert torch.allclose(trainer.model(TOKENS).logits, expected(TOKENS).logits, atol=1e-6)


def test_a_folder_that_is_not_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is missing: give the folder of a model") as missing:
        build(tmp_path / "nowhere", TrainerOptions(0))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="as a causal language model") as broken:
        build(tmp_path, TrainerOptions(0))
    for error in (missing, broken):
        assert "\n" not in str(error.value)
    if not torch.cuda.is_available():
        tiny(True).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="device cuda: torch sees no GPU here"):
            build(tmp_path, TrainerOptions(0, device="cuda"))
