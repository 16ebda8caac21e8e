"""A run that is saved and resumed makes the same updates as one that never stopped."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.config import Machine
from staleflow.config import load as load_config
from staleflow.config.checks import check
from staleflow.tasks.opening import open_source, open_task
from staleflow.training.adapters import adapters
from staleflow.training.build import build
from staleflow.training.checkpoints import STATE, CheckpointError, load, save
from staleflow.training.checksums import CHECKSUMS, damage
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.tiny_models import save_tiny
from tests.training.test_trainer import base, groups_of

__all__ = ["base"]

OPTIONS = TrainerOptions(0, learning_rate=1e-2, warmup_steps=3)


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.feed(trainer.version, groups_of(2, 3, seed=trainer.version, version=trainer.version))
        trainer.finish(trainer.version)


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 2, "kl_coefficient": 0.1},
    "gae": {"advantage": "gae", "value_learning_rate": 0.05},
    "frozen": {"train_only": ("model.layers.*",), "kl_coefficient": 0.1},
    "lora-gae-updates": {"advantage": "gae", "lora_rank": 2, "updates_per_step": 2, "correction": "decoupled"},
}


@pytest.fixture(params=WAYS)
def options(request: pytest.FixtureRequest) -> TrainerOptions:
    return TrainerOptions(0, learning_rate=1e-2, warmup_steps=3, **WAYS[request.param])


def test_a_resumed_run_is_the_same_run(base: Any, tmp_path: Path, options: TrainerOptions) -> None:
    straight = Trainer(copy.deepcopy(base), options)
    train(straight, 3)
    save(straight, tmp_path / "a")
    drawn = torch.rand(3)
    train(straight, 3)
    resumed = Trainer(copy.deepcopy(base), options)
    train(resumed, 1)
    assert load(resumed, tmp_path / "a") == 3
    assert torch.equal(torch.rand(3), drawn), "the same random numbers follow"
    train(resumed, 3)
    assert all(map(torch.equal, straight.parameters, resumed.parameters))
    assert all(map(torch.equal, straight.weights().values(), resumed.weights().values()))
    assert straight.optimiser.state.keys() == {*straight.parameters}


def test_transformers_loads_what_was_saved(base: Any, tmp_path: Path, options: TrainerOptions) -> None:
    trainer = Trainer(copy.deepcopy(base), options)
    train(trainer, 1)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    save(trainer, tmp_path / "a", base=tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.allclose(model(tokens).logits, trainer.model(tokens).logits)
    assert {name for name, _ in model.named_parameters()} == load_file(tmp_path / "a" / "model.safetensors").keys()
    assert (tmp_path / "a" / "tokenizer.json").is_file()
    assert (tmp_path / "a" / "value_head.safetensors").is_file() == (options.advantage == "gae")


def test_tied_embeddings_are_saved_once_and_stay_tied(base: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(base.config)
    config.tie_word_embeddings = True
    straight, resumed = (Trainer(AutoModelForCausalLM.from_config(config).double(), OPTIONS) for _ in range(2))
    train(straight, 2)
    save(straight, tmp_path / "a")
    assert "lm_head.weight" not in load_file(tmp_path / "a" / "model.safetensors")
    load(resumed, tmp_path / "a")
    for trainer in (straight, resumed):
        train(trainer, 2)
    assert all(map(torch.equal, straight.parameters, resumed.parameters))
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight


def test_a_checkpoint_before_the_first_update_forgets_later_ones(base: Any, tmp_path: Path) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    save(trainer, tmp_path / "a")
    train(trainer, 2)
    expected = [each.detach().clone() for each in trainer.parameters]
    assert load(trainer, tmp_path / "a") == 0
    train(trainer, 2)
    assert all(map(torch.equal, trainer.parameters, expected))


def test_more_files_are_part_of_the_checkpoint(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    synced: list[str] = []
    for module in ("checkpoints", "checksums"):
        monkeypatch.setattr(f"staleflow.training.{module}.sync", lambda path: synced.append(path.name))
    save(trainer, tmp_path / "a", also={"control.json": b"{}", "book.bin": b"\0"})
    assert (tmp_path / "a" / "control.json").read_bytes() == b"{}"
    assert {"control.json", "book.bin", "model.safetensors", STATE} <= set(synced)
    assert synced[-3:] == [CHECKSUMS, ".unfinished-a", tmp_path.name], "the folder after its files, the name last"
    assert {"control.json", "book.bin", "model.safetensors", STATE} <= json.loads(
        (tmp_path / "a" / CHECKSUMS).read_text()
    ).keys()
    for name in (STATE, "model.safetensors", "../b", "b/c"):
        with pytest.raises(CheckpointError, match="give another plain name"):
            save(trainer, tmp_path / "b", also={name: b""})
    assert not (tmp_path / "b").exists()


def test_a_run_is_resumed_with_what_it_was_trained_with_only(base: Any, tmp_path: Path) -> None:
    for name, more in WAYS.items():
        trainer = Trainer(copy.deepcopy(base), TrainerOptions(0, learning_rate=1e-2, **more))
        train(trainer, 1)
        save(trainer, tmp_path / name)
    for name, other in (("lora", "full"), ("gae", "full"), ("full", "lora"), ("full", "gae"), ("full", "frozen")):
        with pytest.raises(CheckpointError, match=r"same parameters|for these options"):
            load(Trainer(copy.deepcopy(base), TrainerOptions(0, **WAYS[other])), tmp_path / name)
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "lora", dtype=torch.float64)
    with pytest.raises(CheckpointError, match="build the trainer from the folder that the run began with"):
        load(Trainer(moved, TrainerOptions(0, **WAYS["lora"])), tmp_path / "lora")


def test_an_unfinished_checkpoint_is_never_taken_for_a_whole_one(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    train(trainer, 1)
    save(trainer, tmp_path / "step-1")
    train(trainer, 1)
    with monkeypatch.context() as broken:
        broken.setattr("staleflow.training.checkpoints.os.rename", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            save(trainer, tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()
    save(trainer, tmp_path / "step-3")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_a_checkpoint_that_is_replaced_is_whole_before_and_after(base: Any, tmp_path: Path) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    save(trainer, tmp_path / "a")
    train(trainer, 1)
    save(trainer, tmp_path / "a", replace=True)
    assert damage(tmp_path / "a") == ""
    assert load(trainer, tmp_path / "a") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_resumed_is_refused(base: Any, tmp_path: Path) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        load(trainer, tmp_path)
    save(trainer, tmp_path / "a")
    with pytest.raises(CheckpointError, match="exists: a checkpoint is never overwritten"):
        save(trainer, tmp_path / "a")
    other = copy.deepcopy(base)
    other.model.norm.weight = torch.nn.Parameter(torch.ones(99, dtype=torch.float64))
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \(16,\), the model has \(99,\)"):
        load(Trainer(other, OPTIONS), tmp_path / "a")
    (tmp_path / "a" / STATE).write_text(json.dumps({"format": 9, "version": 0}))
    with pytest.raises(CheckpointError, match="has format 9"):
        load(trainer, tmp_path / "a")


def test_a_checkpoint_is_a_whole_model_that_chats_and_is_trained_on(tmp_path: Path) -> None:
    """Its chat template was lost, so a chat model could neither be served nor trained further."""
    folder = save_tiny(tmp_path / "base")
    (folder / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}+1={% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    (folder / "vocab.json").write_text("{}")
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{at}+{at}", "answer": 2 * at}) + "\n" for at in range(1, 9)))
    made: list[str] = []
    for step in range(2):  # the second is made from the first
        trainer = build(folder, TrainerOptions(0))
        train(trainer, 1)
        save(trainer, target := tmp_path / f"step-{step}", base=folder)
        assert damage(target) == ""
        for name in ("chat_template.jinja", "generation_config.json", "vocab.json"):
            assert (target / name).read_bytes() == (folder / name).read_bytes()
        chat = ["data.chat=true", f"data.source={source}", "reward.function=last-number"]
        chat += ["data.max_prompt_tokens=16", "rollout.max_tokens=16"]
        config = load_config("plain", [f"model={target}", *chat])
        check(config, Machine(cores=2, memory=64 * 2**30))
        task = open_task(config.data, open_source(config.data, config.seed), target, config.seed, 2)
        made.append(task.prompts.ids(0).hex())
        messages = [{"role": "user", "content": "1+1"}]
        assert AutoTokenizer.from_pretrained(target).apply_chat_template(messages, tokenize=False) == "1+1+1="
        assert AutoModelForCausalLM.from_pretrained(target).generation_config.eos_token_id == [1, 2]
        folder = target
    assert made[0] == made[1]
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ message }}")
    assert damage(folder).startswith("additional_chat_templates/tools.jinja has")


def test_peft_loads_the_adapters_onto_the_base_model_and_transformers_the_whole(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    folder = save_tiny(tmp_path / "base")
    trainer = build(folder, options := TrainerOptions(0, lora_rank=2, learning_rate=1e-2, warmup_steps=1))
    train(trainer, 2)
    save(trainer, target := tmp_path / "a", base=folder)
    described = json.loads((target / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(folder)
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), target / "adapter")
    whole, before = (AutoModelForCausalLM.from_pretrained(each) for each in (target, folder))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.allclose(adapted(tokens).logits, whole(tokens).logits, atol=1e-5)
    assert not torch.allclose(whole(tokens).logits, before(tokens).logits, atol=1e-5)
    straight = trainer.weights()
    resumed = build(folder, options)
    load(resumed, target)
    assert all(map(torch.equal, straight.values(), resumed.weights().values()))
    save_file(adapters(trainer.model), target / "adapters.safetensors")  # as earlier releases wrote them
    (target / "adapter" / "adapter_model.safetensors").unlink()
    assert load(build(folder, options), target) == 2
