"""What a resume will do is said before anything is loaded, and where nothing is left it changes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.cli import main, parse
from staleflow.commands import train
from staleflow.config import Config, Machine, estimate, load, to_yaml
from staleflow.run import resuming
from staleflow.run.checkpoints import choose
from staleflow.run.directory import RunDirectory
from staleflow.run.processes import Process
from staleflow.run.record import Record
from staleflow.run.resuming import outlook, prepared
from staleflow.run.state import STATE, pack_state
from staleflow.runtime.local.supervisor import Supervisor
from staleflow.training.checkpoints import save
from tests.run.test_checkpoints import new_server, new_trainer

STEPS = 5


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    """A run of five steps that has ended."""
    run = RunDirectory(tmp_path / "runs" / "one")
    run.logs.mkdir(parents=True)
    trainer = new_trainer()
    trainer.version = STEPS
    save(trainer, run.checkpoint(STEPS), also={STATE: pack_state(new_server(STEPS), Record(1))})
    run.config_file.write_text(to_yaml(load(None, [f"steps={STEPS}", f"runs={run.path.parent}"])))
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(STEPS)))
    run.summary.write_text(json.dumps({"steps": STEPS, "interrupted": False}))
    (run.path / "events.db").write_bytes(b"the journal")
    (run.path / "lock").write_bytes(b"process 1 on a machine")
    return run


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a folder: when it was changed, how it may be used, and what is in it."""
    return {
        str(each.relative_to(folder)): (
            each.lstat().st_mtime_ns,
            each.lstat().st_mode,
            each.read_bytes() if each.is_file() else b"",
        )
        for each in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("words", [[], [f"steps={STEPS - 2}"], ["--json"], ["evaluation.every=1"]])
def test_a_resume_of_a_finished_run_says_so_and_changes_no_byte(
    finished: RunDirectory, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """It started everything, and wrote a lower number of steps into config.yaml."""
    before = tree(finished.path.parent)
    assert main(["train", "--resume", str(finished.path), *words]) == 0
    assert tree(finished.path.parent) == before
    said = capsys.readouterr()
    text = said.err if "--json" in words else said.out
    assert "nothing is left to do, and nothing was changed" in text
    assert f"--resume {finished.path} steps={2 * STEPS}" in text
    if "--json" in words:
        assert json.loads(said.out)["steps"] == STEPS


def test_a_resume_beside_its_processes_is_refused_if_it_wants_more_than_they_have_and_is_free(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where processes were left it was not asked how much there is: instances died of their ``kv_tokens``, six times
    each, and took other processes of the machine with them."""
    needed = estimate(load(None, []), Machine(2, 2**33)).needed()
    monkeypatch.setattr(train, "this_machine", lambda: Machine(cores=2, memory=2**30))
    monkeypatch.setattr(train, "processes", lambda _: iter([Process("i0", 1, 0, 0, finished.path)]))
    monkeypatch.setattr(train, "train", lambda *_: {"interrupted": False})
    assert needed > 2**30
    for tokens, code in (("65536", 0), ("10000000", 2)):
        assert (
            main(["train", "--resume", str(finished.path), f"steps={2 * STEPS}", f"rollout.kv_tokens={tokens}"]) == code
        )
    assert "the run needs" in capsys.readouterr().err


@pytest.mark.parametrize("stored", [True, False])
def test_what_was_scaled_since_a_resume_stays_when_its_control_plane_dies(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """The next one applied the words of the command again."""
    words = ["train", "--resume", str(finished.path), f"steps={2 * STEPS}", "rollout.instances=3"]
    begun: list[int] = []

    def trained(config: Config, *_: object) -> dict[str, bool]:
        begun.append(config.rollout.instances)
        return {"interrupted": False}

    monkeypatch.setattr(train, "train", trained)
    scaled = load(str(finished.config_file), [f"steps={2 * STEPS}", "rollout.instances=4"])
    finished.write_config(scaled)
    assert train.run_once(parse(words), Supervisor(-1, -1, finished.path, stored)) == 0
    assert begun == [4 if stored else 3]


@pytest.mark.processes
def test_a_resume_says_what_it_will_do_before_pytorch_is_loaded(finished: RunDirectory) -> None:
    code = "import sys; from staleflow.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "train", "--resume", str(finished.path)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith(f"{finished.path} has made all its {STEPS} steps")
    assert said[1] == "False"


def test_a_run_whose_logs_were_removed_can_be_resumed(tmp_path: Path) -> None:
    config = load(None, [f"runs={tmp_path}"])
    directory = RunDirectory.create(config, "test")
    directory.logs.rmdir()
    directory.checkpoints.rmdir()
    prepared(directory, config, choose(directory.checkpoints), "", tmp_path)
    assert directory.logs.is_dir()
    assert directory.checkpoints.is_dir()


def test_what_is_left_is_counted_and_named(finished: RunDirectory) -> None:
    ahead = outlook(finished, load(None, ["steps=12"]))
    assert not ahead.finished
    assert ahead.text() == (
        f"resumes {finished.path}: 5 of 12 steps are made, 7 are left; from checkpoint step-000005 and the journal"
    )
    finished.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(9)))
    assert "9 of 12 steps are made, 3 are left" in outlook(finished, load(None, ["steps=12"])).text()
    finished.metrics.write_text("not json\n")
    assert "5 of 12 steps are made" in outlook(finished, load(None, ["steps=12"])).text()


def test_with_a_falling_learning_rate_more_steps_are_another_run(finished: RunDirectory) -> None:
    ahead = outlook(finished, load(None, [f"steps={STEPS}", "training.schedule=cosine"]))
    assert f"To train on: a new run, with model={finished.checkpoint(STEPS)}" in ahead.text()


@settings(max_examples=60)
@given(
    saved=st.integers(1, 8),
    steps=st.integers(1, 8),
    summed=st.none() | st.integers(0, 8),
    interrupted=st.booleans(),
    damaged=st.booleans(),
)
def test_a_run_is_finished_if_checkpoint_and_summary_are_of_its_last_step(
    tmp_path_factory: pytest.TempPathFactory,
    saved: int,
    steps: int,
    summed: int | None,
    interrupted: bool,
    damaged: bool,
) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    run.checkpoint(saved).mkdir(parents=True)
    if summed is not None:
        run.summary.write_text(json.dumps({"steps": summed, "interrupted": interrupted}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming, "wrong_with", lambda _folder: "damaged" if damaged else "")
        ahead = outlook(run, load(None, [f"steps={steps}"]))
    assert ahead.finished == (saved >= steps and summed == saved and not interrupted and not damaged)


def test_a_resume_with_other_steps_under_a_schedule_says_why_and_what_to_do(
    finished: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"steps={STEPS}", "training.schedule=cosine", f"runs={finished.path.parent}"]
    finished.config_file.write_text(to_yaml(load(None, words)))
    assert main(["train", "--resume", str(finished.path), "steps=9"]) == 2
    said = capsys.readouterr().err
    assert "other settings of steps (training.schedule=cosine depends on them)" in said
    assert f"by model={finished.checkpoint(STEPS)}" in said
