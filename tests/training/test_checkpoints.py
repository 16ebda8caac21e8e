"""A run that is saved and resumed makes the same updates as one that never stopped."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from staleflow.training.checkpoints import STATE, CheckpointError, load, newest, save
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.training.test_trainer import base, groups_of

__all__ = ["base"]

OPTIONS = TrainerOptions(0, learning_rate=1e-2, warmup_steps=3)


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.feed(trainer.version, groups_of(2, 3, seed=trainer.version, version=trainer.version))
        trainer.finish(trainer.version)


def test_a_resumed_run_is_the_same_run(base: Any, tmp_path: Path) -> None:
    straight = Trainer(copy.deepcopy(base), OPTIONS)
    train(straight, 3)
    save(straight, tmp_path / "a")
    drawn = torch.rand(3)
    train(straight, 3)
    resumed = Trainer(copy.deepcopy(base), OPTIONS)
    train(resumed, 1)
    assert load(resumed, tmp_path / "a") == 3
    assert torch.equal(torch.rand(3), drawn), "the same random numbers follow"
    train(resumed, 3)
    for one, other in zip(straight.parameters, resumed.parameters, strict=True):
        assert torch.equal(one, other)


def test_transformers_loads_what_was_saved(base: Any, tmp_path: Path) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    train(trainer, 1)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    save(trainer, tmp_path / "a", tokenizer=tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.allclose(model(tokens).logits, trainer.model(tokens).logits)
    assert (tmp_path / "a" / "tokenizer.json").is_file()


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
    assert newest(tmp_path) == tmp_path / "step-1"
    save(trainer, tmp_path / "step-3")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1", "step-3"]
    assert newest(tmp_path) == tmp_path / "step-3"
    assert newest(tmp_path / "nothing") is None


def test_what_cannot_be_resumed_is_refused(base: Any, tmp_path: Path) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    with pytest.raises(CheckpointError, match="is no whole checkpoint"):
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
