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
from staleflow.errors import RunError
from staleflow.run.directory import RunDirectory

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
