"""Names on the Hugging Face hub: taken from its cache, and one line where that does not have them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from staleflow.config import load
from staleflow.config.checks import check
from staleflow.tasks.hub import hub_folder
from staleflow.tasks.opening import model_folder
from staleflow.tasks.options import SOURCES, is_hub_name
from staleflow.tasks.sources import read_hub
from staleflow.tasks.task import TaskError
from tests.refusals import refused
from tests.tiny_models import save_chat


@pytest.fixture(autouse=True)
def nothing_known() -> Any:
    hub_folder.cache_clear()
    yield
    hub_folder.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub that cannot be reached, with one model in its cache."""
    calls: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if name != "me/tiny":
            raise ConnectionError("no network")
        return str(Path("cached"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_model_in_the_cache_is_used_and_nothing_is_asked_of_the_network(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_chat(tmp_path / "cached")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2", "answer": "4"}\n')
    words = ["model=me/tiny", f"data.source={rows}", "reward.function=exact-match", "data.max_prompt_tokens=8"]
    check(load("plain", [*words, "rollout.max_tokens=8", "data.chat=true"]))
    assert model_folder("me/tiny", "cache") == Path("cached")
    assert all(call["local_files_only"] for call in asked)
    assert "*.safetensors" not in asked[0]["allow_patterns"], "a check loads no weights"


def test_a_model_that_cannot_be_reached_is_one_line(asked: list[dict[str, Any]]) -> None:
    assert "hf download me/other" in refused(hub_folder, "me/other")
    assert [call.get("local_files_only", False) for call in asked] == [True, False]


def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("openai/gsm8k")
    assert SOURCES.key("openai/gsm8k") == "OWNER/NAME"
    Path("models/mine").mkdir(parents=True)
    for name in ("models/mine", "gsm8k", "a/b/c", "/nowhere/x", "./x", "~/x"):
        assert not is_hub_name(name), name
    assert SOURCES.key("data/train.jsonl") == ".jsonl"


def test_a_data_set_of_the_hub_is_rows_and_one_that_cannot_be_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_dataset(path: str, split: str, **arguments: Any) -> list[dict[str, Any]]:
        if arguments != {"name": "main"}:
            raise ValueError("Config name is missing.\nPick one.")
        return [{"question": f"{path} {split}", "answer": "4"}]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    [problem] = read_hub("openai/gsm8k", "question", **{"name": "main"})
    assert (problem.prompt, problem.facts["answer"]) == ("openai/gsm8k train", "4")
    with pytest.raises(TaskError, match=r"cannot be loaded .*Pick one.*correct the name or data\.arguments"):
        read_hub("openai/gsm8k", "question")


def test_without_a_network_only_the_cache_is_asked_for_data_and_the_refusal_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(HF_HUB_OFFLINE=False)

    def load_dataset(path: str, **_: Any) -> list[dict[str, Any]]:
        assert config.HF_HUB_OFFLINE, "it would try for half a minute"
        if path != "me/cached":
            raise ConnectionError("Offline mode is enabled.")
        return [{"prompt": "2 + 2", "answer": "4"}]

    def dataset_info(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, config=config))
    assert [each.prompt for each in read_hub("me/cached")] == ["2 + 2"]
    with pytest.raises(TaskError, match=r"cannot be loaded .*\(OSError: Name or service not known\): correct the name"):
        read_hub("me/other")
