"""A checkpoint is resumed with what it was made with, or not at all."""

import json
import random
from pathlib import Path

import pytest

from staleflow.config import load
from staleflow.errors import RunError
from staleflow.run.origin import ORIGIN, WHOLE, origin_of, refuse_other_origin, refuse_other_settings
from staleflow.tasks.prompts import DataPrompts
from staleflow.tasks.task import Problem


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(WHOLE + 5))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, model: Path) -> Path:
    folder = tmp_path / "step-000010"
    folder.mkdir()
    config = load(None, [f"model={model}", "groups=8", "data.source=train.jsonl"])
    (folder / ORIGIN).write_bytes(origin_of(config, "d1", model))
    return folder


def configured(model: Path, *changes: str):
    return load(None, [f"model={model}", "groups=8", "data.source=train.jsonl", *changes])


def test_the_same_run_is_let_pass_and_so_are_settings_that_may_change(checkpoint: Path, model: Path) -> None:
    config = configured(model, "steps=500", "evaluation.every=3")
    refuse_other_settings(checkpoint, config)
    refuse_other_origin(checkpoint, config, "d1", model)


def test_an_emptied_or_edited_configuration_is_refused_with_the_difference(checkpoint: Path, model: Path) -> None:
    with pytest.raises(RunError, match=r"staleness was 2 and is 1.*: put them back, or start a new run"):
        refuse_other_settings(checkpoint, configured(model, "staleness=1"))
    with pytest.raises(RunError, match=r"groups was 8 and is 32.* and \d+ more"):
        refuse_other_settings(checkpoint, load(None, []))


def test_a_setting_that_did_not_exist_when_the_checkpoint_was_made_is_no_difference(
    checkpoint: Path, model: Path
) -> None:
    saved = json.loads((checkpoint / ORIGIN).read_text())
    del saved["settings"]["filter"]
    saved["settings"]["gone"] = 1
    (checkpoint / ORIGIN).write_text(json.dumps(saved))
    refuse_other_settings(checkpoint, configured(model))


def test_other_data_is_refused(checkpoint: Path, model: Path) -> None:
    with pytest.raises(RunError, match=r"other data than data.source=train.jsonl has now: put it back"):
        refuse_other_origin(checkpoint, configured(model), "d2", model)


def test_other_weights_of_the_base_model_are_refused(checkpoint: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes(random.Random(1).randbytes(WHOLE + 5))
    with pytest.raises(RunError, match=r"another base model \(model.safetensors changed\)"):
        refuse_other_origin(checkpoint, configured(model), "d1", model)


def test_a_checkpoint_of_an_earlier_release_is_not_compared(tmp_path: Path, model: Path) -> None:
    refuse_other_settings(tmp_path, configured(model))
    refuse_other_origin(tmp_path, configured(model), "d1", model)


def encoded(text: object) -> list[int]:
    return list(str(text).encode())


def test_shuffled_cut_and_answered_otherwise_is_other_data() -> None:
    problems = [Problem(f"{at} + 1", {"answer": str(at + 1)}) for at in range(20)]
    others = [problems[::-1], problems[:10], [Problem(each.prompt, {"answer": "0"}) for each in problems]]
    seen = {DataPrompts(each, encoded).fingerprint for each in (problems, *others)}
    assert len(seen) == 4
    assert DataPrompts(list(problems), encoded).fingerprint in seen
