"""``staleflow profile``: measures, fits, stores, draws, and says in one line what is wrong."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from staleflow.cli import main

SMALL = ["profile", "--running", "4", "--context", "64"]


def test_what_is_measured_is_stored_drawn_and_can_be_simulated_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, picture = tmp_path / "profile.json", tmp_path / "profile.svg"
    assert main([*SMALL, "--json", "--context", "256", "--output", str(output), "--picture", str(picture)]) == 0
    stored = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == stored
    assert {(point["running"]) for point in stored["points"]} == {1, 2, 4}
    assert all(point["seconds"] > 0 for point in stored["points"])
    assert stored["coefficients"]["floor"] > 0
    assert stored["coefficients"]["per_prefill_token"] >= 0
    assert set(stored["error"]) == {"mean", "worst", "unseen"}
    circles = [each for each in ElementTree.parse(picture).iter() if each.tag.endswith("circle")]
    assert len(circles) == len(stored["points"])
    small = [
        "--instances",
        "2",
        "--groups",
        "2",
        "--group-size",
        "2",
        "--steps",
        "2",
        "training_gpus=4",
        "max_tokens=200",
    ]
    assert main(["simulate", *small, "--json", "--profile", str(output)]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "preset nowhere is unknown: choose one of laptop"),
        (["--running", "0"], "--running is 0: give at least 1"),
        (["--dtype", "float8"], "rollout.dtype=float8: write one of float32, bfloat16"),
        (["--device", "tpu"], "rollout.device=tpu is unknown: give cpu, cuda or cuda:0"),
        (["--running", "1"], "1 sequences: ask for more sequences or longer contexts"),
        (["--output", "no/such/folder/x.json"], "give a file in a folder that exists and is yours"),
        (["--output", "x.svg"], "is also the name of the picture: give one that ends in .json"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is half-written"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"coefficients": {"floor": "slow"}}', '{"coefficients": null}'])
def test_a_profile_that_is_none_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert main(["simulate", "--profile", str(path)]) == 2
    assert "holds no coefficients: make it with staleflow profile" in capsys.readouterr().err
    assert main(["simulate", "--profile", str(tmp_path / "missing")]) == 2
