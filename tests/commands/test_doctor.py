"""``staleflow doctor``: what is there, what is missing, and how to mend it."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from staleflow.cli import main
from staleflow.commands import doctor
from staleflow.config.machine import Machine


def test_a_machine_that_trains_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--runs", str(tmp_path / "not" / "there"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is True
    assert {"hardware", "packages", "engines", "limits", "shared_memory", "findings"} <= facts.keys()
    assert facts["engines"]["builtin"] == {"works": True, "why": ""}
    assert facts["hardware"]["cores"] >= 1
    assert not (tmp_path / "not").exists()
    assert main(["doctor"]) == 0
    assert "everything that is needed is here" in capsys.readouterr().out


def test_a_file_in_the_place_of_the_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["doctor", "--runs", str(file / "runs")]) == 1
    assert f"ERROR: {file} is not a folder: give another folder by runs=..." in capsys.readouterr().out


def test_what_is_missing_is_named_with_its_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in ("torch", "peft"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    def no_torch(_name: str) -> None:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor.ENGINES, "load", no_torch)
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(2, 1 << 30, (), 32 << 20))
    assert main(["doctor", "--runs", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "ERROR: torch is not installed: pip install 'staleflow[local]'" in told
    assert "note: peft is not installed" in told
    assert "ERROR: only 1.00 GiB of memory are available" in told
    assert "ERROR: only 32.0 MiB of shared memory are free: staleflow clean, or docker run --shm-size=8g" in told
    assert "builtin: No module named 'torch'" in told
    assert "ERROR: no engine works" in told
    assert told.endswith("nothing can be trained here yet\n")


def test_a_share_of_the_multiprocessors_is_named_where_it_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(2, 64 << 30, (80 << 30,), 32 << 30))

    def told() -> str:
        main(["doctor", "--runs", str(tmp_path)])
        return capsys.readouterr().out

    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "36")
    assert "Multi-Process Service" not in told()
    (tmp_path / "control").touch()
    assert "note: CUDA's Multi-Process Service gives a process 36 % of a GPU" in told()
    for whole in ("", " 100", "100.0"):
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", whole)
        assert "Multi-Process Service" not in told()
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "36")
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(2, 64 << 30, (), 32 << 30))
    assert "Multi-Process Service" not in told()
