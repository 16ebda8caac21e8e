"""``staleflow scale``: what it refuses, in one line, and what it prints."""

import json
from pathlib import Path

import pytest

from staleflow.cli import main
from staleflow.commands import scale
from staleflow.config import load, to_yaml
from staleflow.run import requests
from staleflow.run.directory import RunDirectory
from tests.refusals import refused_command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of the name ``mine`` among ``runs``."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(load(None, [])))
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere rollout=2", "nowhere"),
        ("runs/mine rollout=2", "is not running"),
        ("mine rollout=2", "is not running"),
        ("mine rollout=0", "rollout=0: give a number of instances, 1 or more"),
        ("mine rollout=-1", "1 or more"),
        ("mine rollout=many", "1 or more"),
        ("mine rollout=1.5", "1 or more"),
        ("mine rollout=99999999999999999999", "rollout.instances"),
        ("mine rollout", "give rollout=N"),
        ("mine trainer=2", "'trainer' cannot be scaled: give rollout=N"),
        ("mine", "the following arguments are required"),
        ("mine rollout=2 rollout=3", "unrecognized arguments"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys: pytest.CaptureFixture[str], run: Path, words: str, said: str) -> None:
    assert said in refused_command(capsys, "scale", *words.split())
    assert [each.name for each in run.iterdir()] == ["config.yaml"]


def test_the_answer_is_printed(capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, object]] = []

    def ask(directory: RunDirectory, values: object, timeout_s: float) -> dict[str, object]:
        assert timeout_s == scale.WAIT_S
        asked.append((directory.path, values))
        return {"text": "instances 2 -> 4: i2, i3 started", "instances": ["i0", "i1", "i2", "i3"]}

    monkeypatch.setattr(requests, "ask", ask)
    assert main(["scale", "mine", "rollout=4"]) == 0
    assert capsys.readouterr().out == "instances 2 -> 4: i2, i3 started\n"
    assert main(["scale", str(run), "rollout=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["instances"] == ["i0", "i1", "i2", "i3"]
    assert asked == [(run, {"rollout": 4})] * 2
