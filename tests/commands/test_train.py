"""Bad input gets one line that says what to write instead, exit code 2, and leaves nothing behind."""

import argparse
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from staleflow.cli import main, parse
from staleflow.commands import train
from staleflow.commands.common import typed
from staleflow.commands.train import run_once, summary_text
from staleflow.config import Config, load, to_yaml
from staleflow.run.directory import RunDirectory
from staleflow.run.record import Record
from staleflow.run.state import STATE
from staleflow.runtime.local.supervisor import NO_ROOM, Supervisor
from tests.refusals import refused_command
from tests.tiny_models import save_chat, save_tiny


def refused(capsys: pytest.CaptureFixture[str], runs: Path, *words: str) -> str:
    said = refused_command(capsys, "train", f"runs={runs}", *words)
    assert not runs.exists() or not list(runs.iterdir()), "nothing is half-written"
    return said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=/nowhere"], "no such folder"),
        (["staleness=-1"], "give 0 or more"),
        (["rollout.instances=100000"], "give rollout.instances="),
        (["groups=0"], "groups=0"),
        (["bound=2"], "bound is unknown"),
        (["nonsense"], "preset nonsense is unknown"),
        (["laptop", "one-gpu"], "give one preset or file"),
        (["reward.function=tests.runtime.local.rewards:not_a_number"], "the reward is nan: return a finite number"),
        (["reward.function=tests.runtime.local.rewards:text"], "the reward is '1.0', a str: return a number"),
        (["reward.function=no_such_module:reward"], "no_such_module"),
        (["--resume", "/nowhere"], "is not a run directory"),
    ],
)
def test_bad_input_is_refused_before_anything_heavy_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], says: str
) -> None:
    if "--resume" in words:
        assert main(["train", *words]) == 2
        assert says in capsys.readouterr().err
    else:
        assert says in refused(capsys, tmp_path / "runs", *words)


@pytest.mark.parametrize("words", [[], ["steps=3"], ["--dry-run"]])
def test_a_simulated_run_is_not_resumed_for_want_of_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    run = tmp_path / "run"
    assert main(["simulate", "--steps", "1", "--instances", "2", "--groups", "2", "--record", str(run)]) == 0
    capsys.readouterr()
    before = {each: each.stat().st_mtime_ns for each in run.rglob("*")}
    assert "is a simulated run" in refused_command(capsys, "train", "--resume", str(run), *words)
    assert {each: each.stat().st_mtime_ns for each in run.rglob("*")} == before


def test_a_run_without_pytorch_is_refused_before_it_starts_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "find_spec", lambda _name: None)
    assert "pip install 'staleflow[local]'" in refused(capsys, tmp_path / "runs")


def test_a_dataset_without_the_named_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "1 + 1", "answer": "2"}) + "\n")
    save_tiny(tmp_path, positions=2048)
    capsys.readouterr()  # what saving the model printed
    words = [f"model={tmp_path}", f"data.source={data}", "data.prompt=prompt", "reward.function=last-number"]
    said = refused(capsys, tmp_path / "runs", *words)
    assert "prompt" in said
    assert "question" in said, "it says what there is"


def test_a_run_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "give another folder" in refused(capsys, tmp_path / "file" / "runs")


def existing_run(tmp_path: Path) -> Path:
    run = RunDirectory(tmp_path / "run")
    run.checkpoint(3).mkdir(parents=True)
    (run.checkpoint(3) / STATE).write_bytes(b"")
    run.config_file.write_text(to_yaml(load(None, ["staleness=2"])))
    return run.path


def test_a_resume_with_other_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = existing_run(tmp_path)
    assert main(["train", "--resume", str(run), "staleness=1", "training.learning_rate=1e-3"]) == 2
    said = capsys.readouterr().err
    assert "other settings of staleness, training.learning_rate" in said
    assert said.count("\n") == 1
    assert main(["train", "--resume", str(run), "laptop"]) == 2
    assert "leave 'laptop' out" in capsys.readouterr().err


def test_a_resume_without_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = existing_run(tmp_path)
    (run / "checkpoints" / "step-000003" / STATE).unlink()
    assert main(["train", "--resume", str(run)]) == 2
    assert "has no whole checkpoint to resume from" in capsys.readouterr().err


def test_a_control_plane_killed_while_a_resume_loads_is_followed_by_another_with_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chaos, seed 2049: the supervisor had not heard yet what was to be continued, and the run ended."""
    run = existing_run(tmp_path)
    (run / "events.db").write_bytes(b"")
    told: list[Path] = []
    steps: list[int] = []

    def killed(config: Config, *_: object) -> None:
        steps.append(config.steps)
        raise SystemExit

    monkeypatch.setattr("staleflow.commands.train.train", killed)
    options = parse(["train", "--resume", str(run), "steps=77"])
    for before in (None, run):
        supervisor = SimpleNamespace(run=before, stored=False, tell=told.append)
        with pytest.raises(SystemExit):
            run_once(options, supervisor)  # type: ignore[arg-type]
    assert told == [run]
    assert steps == [77, 77], "also what the command line changes"


def test_a_dry_run_prints_the_plan_and_trains_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert main(["train", "--dry-run", f"runs={runs}"]) == 0
    assert "needed" in capsys.readouterr().out
    assert main(["train", "--dry-run", "--json", f"runs={runs}"]) == 0
    assert json.loads(capsys.readouterr().out)["instances"] == 2
    assert not runs.exists()


def test_a_dry_run_says_how_many_prompts_would_be_left_out_and_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, data, runs = save_chat(tmp_path / "model"), tmp_path / "data.jsonl", tmp_path / "runs"
    rows = [{"prompt": "x" * (400 if at < 3 else 10) + str(at), "answer": "2"} for at in range(20)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        "train",
        "--dry-run",
        f"model={model}",
        f"data.source={data}",
        "data.max_prompt_tokens=100",
        f"runs={runs}",
    ]
    words += ["reward.function=exact-match", "rollout.max_tokens=16", "data.held_out_count=1"]
    capsys.readouterr()  # what saving the model printed
    assert main(words) == 0
    about = capsys.readouterr().out.splitlines()[-1]
    assert about.startswith("data: 1")
    assert "longer than data.max_prompt_tokens=100 (the longest has 40" in about
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data"]
    assert found["problems_left_out"] in (2, 3), "of those that are not held out"
    assert found["problems"] + found["problems_left_out"] + found["held_out"] == 20
    assert main([*words, "rollout.instances=100000"]) == 2
    said = capsys.readouterr()
    assert "does not fit: " in said.out
    assert "data: 1" in said.out, "also of what does not fit"
    assert not runs.exists()


def test_a_summary_without_an_evaluation_can_be_shown(tmp_path: Path) -> None:
    summary = {
        "accuracy_initial": None, "accuracy_final": None, "steps": 0, "wall_s": 0.0, "trained_tokens_per_s": 0.0,
        "max_staleness": 0, "bound": 2, "violations": 0, "trainer_idle": 0.0, "control_overhead": 0.0,
        "tokens_wasted": 0, "seconds_to_90": None, "interrupted": True, "binary": True,
    }  # fmt: skip
    assert "--resume" in summary_text(summary, RunDirectory(tmp_path))


def test_a_figure_of_an_earlier_step_is_not_told_as_that_of_the_last_one(tmp_path: Path) -> None:
    """A run that was stopped before its second evaluation said "held-out accuracy 34.2% -> 34.2%"."""
    record = Record(bound=2, version=3, seconds=4.0)

    def said() -> str:
        summary = record.summary({"admitted": 0, "committed": 0, "released": {}}) | {"interrupted": True}  # type: ignore[arg-type]
        return summary_text(summary, RunDirectory(tmp_path)).splitlines()[0]

    record.evaluated(0, 0.342)
    assert said() == "held-out accuracy 34.2% (version 0)"
    record.evaluated(2, 0.5)
    assert said() == "held-out accuracy 34.2% -> 50.0% (version 2)"
    record.evaluated(3, 0.625, binary=False)
    assert said() == "held-out mean reward 0.342 -> 0.625"


@pytest.mark.parametrize("port", ["-1", "65536", "99999"])
def test_a_page_that_cannot_be_shown_is_refused_before_the_run_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, port: str
) -> None:
    """It trained without the page, and ended as if all were well."""
    said = refused(capsys, tmp_path / "runs", "--dash", "--port", port)
    assert f"--port {port} is impossible: give one from 0 to 65535" in said


def test_the_page_is_offered_by_a_command_that_works_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / ".venv" / "bin" / "staleflow"
    binary.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(binary.with_name("python3")))
    assert typed() == "staleflow"  # there is no such script: as good as anything
    binary.touch(mode=0o755)
    assert typed() == ".venv/bin/staleflow"
    monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)
    assert typed() == "staleflow"
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert typed() == str(binary)


@pytest.mark.parametrize("told", [True, False])
def test_a_disk_that_is_full_at_the_beginning_is_waited_for_only_where_there_is_a_run(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train, "run_once", full)
    supervisor = Supervisor(-1, -1, Path("run") if told else None)
    with nullcontext() if told else pytest.raises(OSError, match="No space"):
        assert train._begun(argparse.Namespace(), supervisor) == NO_ROOM
