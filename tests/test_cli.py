"""The command line as a person meets it."""

import errno
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli import COMMANDS, UNREAD, main, what_failed

ROOT = str(Path(__file__).parents[1])


def test_train_without_arguments_has_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run"]) == 0
    assert "adder" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no command is given: staleflow train begins a first run; others: runs, dash, why"),
        (["trian"], "'trian' is not a command: write train"),
        (["quantum"], "'quantum' is not a command: choose one of train, runs, "),
    ],
)
def test_a_command_that_is_missing_or_misspelt(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_help_names_every_command_and_imports_only_the_one_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n    {name} " in printed for name in COMMANDS)
    imported: list[str] = []

    def watched(name: str) -> Any:
        imported.append(name)
        return import_module(name)

    monkeypatch.setattr("staleflow.cli.import_module", watched)
    main(["train", "--dry-run"])
    assert imported == ["staleflow.commands.train"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_is_no_traceback(closed: str) -> None:
    command = f"{sys.executable} -m staleflow train steps=x {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == (0 if "2>" in closed else 1)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["runs", "doctor"])
def test_a_pipe_that_is_not_read_to_its_end_is_no_error(tmp_path: Path, command: str, unbuffered: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as unread:
        done = subprocess.run(
            [sys.executable, "-m", "staleflow", command],
            cwd=tmp_path,
            stdout=unread,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == UNREAD
    assert done.stderr == b""


@pytest.mark.parametrize("command", ["train", "simulate", "doctor", "dash"])
def test_a_working_directory_that_was_removed_is_said_so(tmp_path: Path, command: str) -> None:
    words = f"cd {tmp_path}; rmdir {tmp_path}; exec {sys.executable} -m staleflow {command}"
    done = subprocess.run(
        words,
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": ROOT},
    )
    assert done.returncode == 2
    assert done.stderr == "staleflow: error: the working directory was removed: change into one that is there\n"


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/y"), "the path /y is too long"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root/x"),
            "/root/x is not open to this user: give another",
        ),
        (OSError(errno.EIO, "Input/output error", "/disk/x"), "Input/output error: '/disk/x'"),
    ],
)
def test_what_the_system_refuses_is_said_with_what_helps(error: OSError, helps: str) -> None:
    assert helps in what_failed(error)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("streams", [(1,), (1, 2)])
def test_a_run_whose_first_lines_nobody_reads_to_the_end_is_not_lost(
    tmp_path: Path, streams: tuple[int, ...], unbuffered: str
) -> None:
    """It gets as far as the reward, which is refused after the first line of the run."""
    reads, writes = os.pipe()
    os.close(reads)
    words = [f"runs={tmp_path / 'runs'}", "reward.function=tests.runtime.local.rewards:not_a_number"]
    with os.fdopen(writes, "w") as unread:
        done = subprocess.run(
            [sys.executable, "-m", "staleflow", "train", *words],
            stdout=unread,
            stderr=unread if 2 in streams else subprocess.PIPE,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr is None or (b"return a finite number" in done.stderr and done.stderr.count(b"\n") == 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--learning-rate", "1e-5"], "settings are written without dashes: training.learning_rate=VALUE"),
        (["--learning_rate=1e-5"], "settings are written without dashes: training.learning_rate=1e-5"),
        (["--gradient-accumulation-steps", "4"], "a step is always cut into micro-batches"),
        (["--temperature", "1"], "temperature may be rollout.temperature or evaluation.temperature"),
        (["--fly"], "see staleflow train --help"),
    ],
)
def test_an_option_that_is_a_setting_says_how_it_is_written(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_terminal_obeys_nothing_that_a_wrong_word_brings_along(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "/tmp/no\x1b[2J\x07such"]) == 2
    assert r"/tmp/no\x1b[2J\x07such is not a run directory" in capsys.readouterr().err
