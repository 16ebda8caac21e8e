"""One owner of a run directory at a time, decided before anything is written."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.cli import main
from staleflow.config import load
from staleflow.errors import ConfigError, RunError
from staleflow.run.directory import RunDirectory
from tests.refusals import refused, refused_command

pytestmark = pytest.mark.processes

OWN = """
import sys
from pathlib import Path
from staleflow.run.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).owned():
    print("owned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(load(None, [f"runs={tmp_path}"]), "test")


def owner(run: RunDirectory) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", OWN, str(run.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"owned\n"
    return process


def content(run: RunDirectory) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in run.path.rglob("*") if each.is_file()}


@pytest.mark.parametrize(
    "words", ["runs={folder}", "model={folder}", "--resume {folder}", "rollout.stop_strings=[{folder}]"]
)
def test_a_name_that_is_not_utf8_is_one_line_and_leaves_nothing(
    tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    (folder / "config.yaml").touch()
    said = refused_command(capsys, "train", *words.format(folder=folder).split())
    assert "is not UTF-8: rename the file or folder" in said
    assert [each.name for each in folder.iterdir()] == ["config.yaml"]


def test_a_working_directory_whose_name_is_not_utf8_gets_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    for make in (lambda: RunDirectory.create(load(None), "test"), lambda: RunDirectory.at(Path("new"), load(None))):
        assert "is not UTF-8" in refused(make)
    assert not list(folder.iterdir())


def test_a_second_owner_is_refused_and_writes_nothing(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    process = owner(run)
    before = content(run)
    with pytest.raises(RunError, match=f"is being run by process {process.pid} on .*: stop it first"), run.owned():
        pass
    assert main(["train", "--resume", str(run.path), "steps=77"]) == 2
    assert f"is being run by process {process.pid}" in capsys.readouterr().err
    assert content(run) == before
    process.communicate()
    with run.owned():
        pass


def test_a_killed_owner_leaves_the_directory_free(run: RunDirectory) -> None:
    process = owner(run)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with run.owned() as mine:
        assert mine is run


def test_a_directory_that_cannot_be_written_is_one_line(run: RunDirectory) -> None:
    (run.path / "lock").mkdir()
    with pytest.raises(RunError, match="cannot be written"), run.owned():
        pass


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a\x1b[2Jb", r"a\\x1b\[2Jb' has characters that cannot be printed"),
        ("/".join(["long"] * 100), "is too long: give a folder of at most 400 by runs="),
    ],
)
def test_a_folder_that_cannot_be_printed_or_opened_gets_no_run(tmp_path: Path, name: str, why: str) -> None:
    """The line that names the run could not be copied, or the terminal obeyed it."""
    with pytest.raises(ConfigError, match=why):
        RunDirectory.create(load(None, [f"runs={tmp_path / name}"]), "x")
    assert not list(tmp_path.iterdir())


def test_nobody_else_can_read_a_run(run: RunDirectory) -> None:
    assert stat.S_IMODE(os.stat(run.path).st_mode) == 0o700


def test_a_death_while_the_configuration_is_written_leaves_the_one_before(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.config_file.read_text()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("staleflow.run.directory.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_config(load(None, ["steps=77"]))
    assert run.config_file.read_text() == before
