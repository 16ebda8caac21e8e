"""``staleflow runs``: what is in a folder of runs, whatever state they are in."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli import main
from staleflow.config import load
from staleflow.run.directory import RunDirectory


def made(runs: Path, name: str, step: int, /, **summary: Any) -> RunDirectory:
    run = RunDirectory.create(load(None, [f"runs={runs}", "steps=4"]), name)
    rows = [{"step": step, "time": 2.0 * step, "reward": 0.25} for step in range(step)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        run.write(run.summary, {"steps": step, **summary})
    return run


def shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["runs", "--runs", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    return {each["name"].partition("-")[2].partition("-")[2]: each for each in found}


def test_every_state_is_told_from_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "whole", 4, accuracy_final=0.75, interrupted=False)
    made(tmp_path, "asked", 2, accuracy_final=None, interrupted=True)
    made(tmp_path, "early", 2, stopped_early="accuracy 1.0")
    made(tmp_path, "nothing", 0)
    (made(tmp_path, "killed", 3).checkpoints / "step-000002").mkdir()
    made(tmp_path, "resumed", 3, steps=2, interrupted=True).journal().touch()
    broken = made(tmp_path, "broken", 1)
    broken.config_file.write_text("steps: [")
    broken.summary.write_text('{"steps"')
    broken.metrics.write_text("no row\n")
    alive = made(tmp_path, "alive", 1)
    with alive.owned():
        found = shown(tmp_path, capsys)
        assert main(["runs", "--runs", str(tmp_path)]) == 0
    assert {name: each["state"] for name, each in found.items()} == {
        "whole": "finished",
        "asked": "stopped",
        "early": "finished",
        "nothing": "failed",
        "killed": "resumable",
        "resumed": "resumable",
        "broken": "unreadable",
        "alive": "running",
    }
    assert "alive" in capsys.readouterr().out
    whole = found["whole"]
    assert (whole["step"], whole["steps"], whole["accuracy"], whole["reward"]) == (4, 4, 0.75, 0.25)
    assert whole["bytes"] >= alive.config_file.stat().st_size
    assert [found["broken"][key] for key in ("step", "steps", "reward")] == [0, None, None]


def test_cleaning_up_and_reading_are_no_change_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every run had "changed" when its lock was taken, or its journal read, and the latest was any of them."""
    for age, name in enumerate(("newest", "older", "oldest")):
        run = made(tmp_path, name, 1)
        (run.path / "events.db.lock").touch()
        with run.owned():
            pass
        for each in run.path.iterdir():
            os.utime(each, (1e9 - age, 1e9 - age))
    for path in tmp_path.iterdir():
        for looked in ("events.db.lock", "events.db-shm", "events.db-wal"):
            (path / looked).touch()
    assert main(["clean", "--runs", str(tmp_path), "--cache", str(tmp_path / "none")]) == 0
    capsys.readouterr()
    found = shown(tmp_path, capsys)
    assert [(name, each["changed"]) for name, each in found.items()] == [
        ("newest", 1e9),
        ("older", 1e9 - 1),
        ("oldest", 1e9 - 2),
    ]


@pytest.mark.parametrize("exists", [True, False])
def test_no_runs_is_no_mistake(tmp_path: Path, exists: bool, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    if exists:
        folder.mkdir()
    assert main(["runs", "--runs", str(folder)]) == 0
    assert "staleflow train makes one" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["why", "report", "samples", "trace", "dash"])
def test_without_a_name_the_latest_run_is_meant_and_without_one_the_message_says_how_to_start(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command]) == 2
    assert "runs/latest is not a run directory, there is nothing: staleflow runs" in capsys.readouterr().err
