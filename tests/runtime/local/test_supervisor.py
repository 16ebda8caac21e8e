"""The process above the control plane: what it starts again, what it passes on, what it leaves alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from staleflow.config import load, to_yaml
from staleflow.runtime.local.supervisor import Watch

pytestmark = pytest.mark.processes

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from staleflow.runtime.local.supervisor import Supervisor, supervised
from staleflow.runtime.restarts import Restarts
here = Path(sys.argv[1])

def starts() -> int:
    with (here / "starts").open("a") as file:
        file.write("x")
    return (here / "starts").stat().st_size
"""
END = """
sys.exit(supervised(train, Restarts(most=2)))
"""


def begun(tmp_path: Path, train: str) -> subprocess.Popen[str]:
    program = BEGIN + train + END
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", program, str(tmp_path)]
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, preexec_fn=_hears_everything)


def _hears_everything() -> None:
    """Also where the tests themselves run in the background, or under nohup."""
    for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def ended(tmp_path: Path, train: str) -> tuple[int, str, str]:
    process = begun(tmp_path, train)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def starts(tmp_path: Path) -> int:
    return (tmp_path / "starts").stat().st_size


def test_one_that_is_killed_is_followed_by_another_that_knows_what_it_ran_and_how_it_died(tmp_path: Path) -> None:
    train = """
def train(supervisor):
    if starts() == 1:
        supervisor.tell(here / "run")
        os.kill(os.getpid(), signal.SIGKILL)
    print(supervisor.run, "|", *supervisor.deaths)
    return 7
"""
    code, out, _ = ended(tmp_path, train)
    assert code == 7
    assert out == f"{tmp_path / 'run'} | killed (SIGKILL; out of memory?)\n"


def test_no_death_is_forgotten_however_soon_the_next_one_follows(tmp_path: Path) -> None:
    train = """
def train(supervisor):
    at = starts()
    if at != 2:
        supervisor.tell(here / "run")
    print(at, *supervisor.deaths, flush=True)
    return os.kill(os.getpid(), signal.SIGKILL if at == 1 else signal.SIGBUS) if at < 3 else 0
"""
    killed = "killed (SIGKILL; out of memory?)"
    assert ended(tmp_path, train)[1] == f"1\n2 {killed}\n3 {killed} killed (SIGBUS)\n"


def test_one_that_dies_again_and_again_is_given_up_with_the_way_to_continue(tmp_path: Path) -> None:
    train = """
Restarts.started = lambda *_: None
def train(supervisor):
    starts()
    supervisor.tell(here / "run")
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    code, _, err = ended(tmp_path, train)
    assert (code, starts(tmp_path)) == (128 + signal.SIGSEGV, 3)
    assert "the control plane died 3 times in 10 minutes: killed (SIGSEGV); continue with: " in err
    assert err.strip().endswith(f"staleflow train --resume {tmp_path / 'run'}")


def test_a_program_whose_reward_died_with_it_is_not_told_to_use_the_command_line(tmp_path: Path) -> None:
    """``staleflow train --resume`` was refused: the reward is a function of the program."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load(None, ["reward.function=python:correct"])))
    train = """
Restarts.started = lambda *_: None
def train(supervisor):
    supervisor.tell(here / "run")
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    _, _, err = ended(tmp_path, train)
    assert err.strip().endswith(f"continue with: staleflow.train(resume='{tmp_path / 'run'}', reward=correct)")


def test_one_that_finds_the_disk_full_is_followed_by_another_until_there_is_room(tmp_path: Path) -> None:
    """A control plane that followed a dead one on a full disk ended the run."""
    train = """
from staleflow.runtime.local import supervisor as module
module.ROOM_S = 0.0
def train(supervisor):
    at = starts()
    if at == 1:
        supervisor.tell(here / "run")
        os.kill(os.getpid(), signal.SIGKILL)
    return module.NO_ROOM if at < 4 else 7
"""
    code, _, err = ended(tmp_path, train)
    assert (code, starts(tmp_path)) == (7, 4)
    assert err == f"staleflow: no room on the disk of {tmp_path / 'run'}: continues when there is\n"


def test_the_next_one_knows_whether_settings_were_stored(tmp_path: Path) -> None:
    train = """
def train(supervisor):
    print(supervisor.run, supervisor.stored, flush=True)
    at = starts()
    supervisor.tell(here, stored=at > 1)
    return os.kill(os.getpid(), signal.SIGKILL) if at < 3 else 0
"""
    _, out, _ = ended(tmp_path, train)
    assert out.replace(str(tmp_path), "run").splitlines() == ["None False", "run False", "run True"]


def test_one_that_finds_the_disk_full_before_anything_has_begun_is_not(tmp_path: Path) -> None:
    assert ended(tmp_path, "def train(supervisor):\n    return 75")[0] == 75


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("return 2", 2),
        ("raise ValueError('a mistake of ours')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", 130),
        ("os.kill(os.getpid(), signal.SIGQUIT); time.sleep(60)", 128 + signal.SIGQUIT),
    ],
)
def test_one_that_ends_by_itself_or_is_asked_to_is_not_started_again(tmp_path: Path, last: str, code: int) -> None:
    train = f"""
def train(supervisor):
    starts()
    supervisor.tell(here / "run")
    {last}
"""
    assert ended(tmp_path, train)[0] == code
    assert starts(tmp_path) == 1


def test_one_that_dies_before_it_has_the_run_that_it_resumes_in_hand_is_followed_by_another(tmp_path: Path) -> None:
    """A control plane killed in the first second of a ``--resume`` ended the run."""
    train = """
def train(supervisor):
    print(supervisor.run, "|", *supervisor.deaths, flush=True)
    return os.kill(os.getpid(), signal.SIGKILL) if starts() < %d else 0

sys.exit(supervised(train, Restarts(most=2), resumes=here / "run"))
"""
    code, out, _ = ended(tmp_path, train % 2)
    assert (code, out) == (0, "None |\nNone | killed (SIGKILL; out of memory?)\n")
    code, _, err = ended(tmp_path, "Restarts.started = lambda *_: None\n" + train % 9)
    assert code == 128 + signal.SIGKILL
    assert err.strip().endswith(f"continue with: staleflow train --resume {tmp_path / 'run'}")


def test_one_that_dies_before_it_runs_anything_is_not_started_again(tmp_path: Path) -> None:
    train = """
def train(supervisor):
    starts()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, err = ended(tmp_path, train)
    assert (code, starts(tmp_path)) == (128 + signal.SIGKILL, 1)
    said = "the control plane died: killed (SIGKILL; out of memory?) before it had begun: give the same command again"
    assert err == f"staleflow: error: {said}\n"


ASYNC = """
import asyncio, subprocess

def train(supervisor):
    async def run():
        stopped = asyncio.get_running_loop().create_future()
        supervisor.attend(stopped.set_result, print)
        print("runs", os.getpid(), flush=True)
        (here / "stopped").write_text((await asyncio.wait_for(stopped, 60)).name)
    asyncio.run(run())
    return 3
"""


def test_ctrl_c_for_the_supervisor_alone_reaches_the_control_plane_once(tmp_path: Path) -> None:
    process = begun(tmp_path, ASYNC)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 3
    assert (tmp_path / "stopped").read_text() == "SIGINT"


def test_the_control_plane_stops_when_its_supervisor_is_dead(tmp_path: Path) -> None:
    process = begun(tmp_path, ASYNC)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(60)
    assert process.stdout.read() == "", "to its end, that of the control plane"
    assert (tmp_path / "stopped").read_text() == "SIGTERM"


def test_how_a_process_of_a_dead_control_plane_ended_is_told_to_the_next(tmp_path: Path) -> None:
    train = """
import asyncio, subprocess

def train(supervisor):
    if starts() == 1:
        supervisor.tell(here)
        role = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        (here / "pid").write_text(str(role.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    async def run():
        told = asyncio.get_running_loop().create_future()
        supervisor.attend(lambda _: None, lambda *what: told.set_result(what))
        os.kill(int((here / "pid").read_text()), signal.SIGKILL)
        pid, code = await asyncio.wait_for(told, 60)
        return 0 if (pid, code) == (int((here / "pid").read_text()), -signal.SIGKILL) else 1

    return asyncio.run(run())
"""
    assert ended(tmp_path, train)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_request_to_stop_while_there_is_no_control_plane_is_not_lost(tmp_path: Path, number: signal.Signals) -> None:
    """Status -15: the signal came while the next control plane waited for its turn."""
    train = """
Restarts.died = lambda *_: print("dead", flush=True) or 600.0
def train(supervisor):
    starts()
    supervisor.tell(here / "run")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    process = begun(tmp_path, train)
    assert process.stdout is not None
    assert process.stdout.readline() == "dead\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, starts(tmp_path)) == (130, 1)
    assert err == (
        "staleflow: stopped while the control plane was dead; continue with: "
        f"staleflow train --resume {tmp_path / 'run'}\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_control_plane_that_is_still_starting_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    train = """
def train(supervisor):
    print("starts", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return 130
"""
    process = begun(tmp_path, train)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait(60) == 130


def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    train = "signal.signal(signal.SIGHUP, signal.SIG_IGN)" + ASYNC
    process = begun(tmp_path, train)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 3, "stopped by the second one, in good order"


def test_a_control_plane_that_stands_still_is_named_killed_and_followed_by_another(tmp_path: Path) -> None:
    train = """
import asyncio
from staleflow.runtime import watchdog
from staleflow.runtime.local import supervisor as module
watchdog.FIRST_LOST_S = watchdog.FIRST_S = watchdog.LATE_S = module.HUNG_S = module.BEAT_S = 0.1

def train(supervisor):
    async def run():
        supervisor.tell(here / "run")
        supervisor.attend(print, print)
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGSTOP)

    if supervisor.deaths:
        print(*supervisor.deaths, flush=True)
        return 4
    asyncio.run(run())
"""
    code, out, err = ended(tmp_path, train)
    assert (code, out) == (4, "stood still\n")
    assert err.startswith("staleflow: the control plane has not moved for ")


@pytest.mark.parametrize(("said", "late"), [(b"moves\n", 1), (b"moves\nleaves\n", 0), (b"/a/run\n", 0)])
def test_only_a_control_plane_that_attends_can_be_late(said: bytes, late: int) -> None:
    told, tells = os.pipe()
    watch = Watch(0, told, -1)
    os.write(tells, said)
    assert watch.heard()
    assert len(watch.watchdog.look(time.monotonic() + 1000)) == late
    os.close(tells)
    assert not watch.heard()
    os.close(told)
