"""What killed runs leave is found and reclaimed, also without their directories; what live ones use stays (D9)."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleflow.cli import main
from staleflow.config import load
from staleflow.run.directory import RunDirectory
from staleflow.run.leftovers import leftovers
from staleflow.run.processes import MODULE
from staleflow.servers.weights import claim, reclaim
from staleflow.servers.weights.segments import SHM_FOLDER, StoreRegistry, unlink_segment
from staleflow.servers.weights.slots import segments_of
from staleflow.tasks import folders
from staleflow.tasks.folders import made_once

pytestmark = pytest.mark.processes

TRAINER = """
import sys
import torch
from staleflow.servers.weights.parameter_server import LocalParameterServer
server = LocalParameterServer.create(sys.argv[2], registry=sys.argv[1])
for version in range(3):
    server.push(version, {"w": torch.zeros(100_000)})
print("pushed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[StoreRegistry]:
    made = StoreRegistry(tmp_path / "registry")
    yield made
    for control in made.folder.glob("*.weights"):
        for segment in segments_of(control.read_bytes()) or ():
            unlink_segment(segment)


@pytest.fixture
def trainers(registry: StoreRegistry) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Of two runs, each with weights in shared memory."""
    command = [sys.executable, "-c", TRAINER, str(registry.folder)]
    processes = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in ("one", "two")
    }
    for process in processes.values():
        assert process.stdout is not None
        assert process.stdout.readline() == b"pushed\n"
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


def segments(registry: StoreRegistry, name: str) -> list[Path]:
    found = segments_of(registry.control(name).read_bytes()) or []
    return [Path(SHM_FOLDER) / each.lstrip("/") for each in found]


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_shared_memory_of_a_killed_run_is_reclaimed_and_that_of_a_live_one_stays(
    tmp_path: Path, registry: StoreRegistry, trainers: dict[str, subprocess.Popen[bytes]]
) -> None:
    kill(trainers["one"])
    dead, live = segments(registry, "one"), segments(registry, "two")
    assert len(dead) == len(live) == 2
    for remove in (False, True):
        assert all(each.exists() for each in dead)
        (found,) = leftovers(tmp_path, tmp_path, remove, registry, shared=Path(SHM_FOLDER) / "not here")
        assert (found.kind, found.name) == ("shared memory", "one")
    assert not any(each.exists() for each in dead)
    assert all(each.exists() for each in live)


def test_segments_whose_record_was_deleted_are_found(
    tmp_path: Path, registry: StoreRegistry, trainers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """As when the directory of a dead run was removed, where earlier releases kept the record."""
    kill(trainers["one"])
    dead, live = segments(registry, "one"), segments(registry, "two")
    shutil.rmtree(registry.folder)
    found = {each.name: each.bytes for each in leftovers(tmp_path, tmp_path, False, StoreRegistry(registry.folder))}
    assert all(found[each.name] >= 400_000 for each in dead)
    assert not {each.name for each in live} & found.keys(), "a process has them mapped"
    for each in (*dead, *live):
        unlink_segment(f"/{each.name}")


def test_a_store_between_two_trainers_of_a_live_run_is_not_reclaimed_by_another_run(
    registry: StoreRegistry, trainers: dict[str, subprocess.Popen[bytes]]
) -> None:
    with claim("one", registry=registry.folder):
        kill(trainers["one"])
        assert reclaim(registry.folder) == []
        assert all(each.exists() for each in segments(registry, "one"))
        dead = segments(registry, "one")
    assert not any(each.exists() for each in dead), "once the run is over, it is"
    assert not list(registry.folder.glob("*.claim"))


def test_a_claim_of_a_killed_process_does_not_stay(registry: StoreRegistry) -> None:
    registry.claimed("dead").touch()
    reclaim(registry.folder)
    assert not registry.claimed("dead").exists()


def test_half_written_checkpoints_of_dead_runs_go_and_those_of_live_ones_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, live = (RunDirectory.create(load(None, [f"runs={tmp_path}"]), name) for name in ("dead", "live"))
    for run in (dead, live):
        draft = run.checkpoints / ".unfinished-step-000001"
        draft.mkdir()
        (draft / "model.safetensors").write_bytes(b"x" * 1000)
    with dead.owned():
        pass
    words = ["clean", "--runs", str(tmp_path), "--cache", str(tmp_path / "cache"), "--json"]
    with live.owned():
        assert main([*words, "--dry-run"]) == 0
        listed = json.loads(capsys.readouterr().out)
        ours = [each for each in listed["leftovers"] if each["kind"] == "checkpoint"]
        assert [(each["name"], each["bytes"]) for each in ours] == [
            (str(dead.checkpoints / ".unfinished-step-000001"), 1000)
        ]
        assert not listed["removed"]
        assert list(dead.checkpoints.iterdir())
        leftovers(tmp_path, tmp_path, True, StoreRegistry(tmp_path / "registry"), shared=tmp_path)
    assert not list(dead.checkpoints.iterdir())
    assert list(live.checkpoints.iterdir())


def test_a_model_whose_maker_was_killed_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "YOUNG_S", -1.0)
    (tmp_path / "model.abc.partial").mkdir()

    def make(draft: Path) -> None:
        assert draft.is_dir()
        assert not (tmp_path / "model.abc.partial").exists()
        assert list(folders.abandoned(tmp_path)) == [], "its own is held"

    made_once(tmp_path / "model", make)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_processes_that_wait_for_a_control_plane_and_dead_sockets_are_found(tmp_path: Path) -> None:
    """Only a run that somebody owns keeps them."""
    registry, run = StoreRegistry(tmp_path / "registry"), tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    words = [sys.executable, "-c", "import time; time.sleep(100)", "-m", MODULE, "socket", "i0", "1", str(run)]
    process = subprocess.Popen(words, start_new_session=True)
    dead, alive = (socket.socket(socket.AF_UNIX) for _ in range(2))
    dead.bind(str(registry.folder / "dead.sock"))
    alive.bind(str(registry.folder / "alive.sock"))
    alive.listen()

    def found(remove: bool) -> list[str]:
        every = leftovers(tmp_path / "runs", tmp_path, remove, registry, tmp_path)
        return [f"{each.kind} {each.name}" for each in every if str(tmp_path) in each.name]

    socket_there = f"socket {registry.folder / 'dead.sock'}"
    with RunDirectory(run).owned():
        assert found(remove=False) == [socket_there]
    assert found(remove=False) == [f"process {process.pid}, i0 of {run}", socket_there]
    threading.Thread(target=process.wait).start()  # as its parent does
    found(remove=True)
    assert process.wait(60) == -signal.SIGKILL
    assert found(remove=False) == []
    alive.close()
    dead.close()
