"""Real runs that are killed, hung, starved and cut off from outside, and an audit of what they leave: nothing lost,
nothing trained twice, nothing too old, nothing left behind. ``bench/chaos.py`` does the same by the hundred."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.chaos_case import plan_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
]
TWO = ("--seed", "12", "--episodes", "0")
"""A run with two instances at bound 2."""
PLAYED = ("--seed", "12", "--episodes", "1")
"""The same, in which environments play."""
BENCH = Path(__file__).parents[2] / "bench" / "chaos.py"


def survived(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """What happened in the runs, all of which must have ended well. It needs a process of its own: for the namespace in
    which disks are full."""
    results = tmp_path / "results.json"
    told = subprocess.run(
        [sys.executable, str(BENCH), *words, "--json", str(results)], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return json.loads(results.read_text())["cases"]


def test_a_run_survives_killed_processes_a_full_disk_and_an_absent_service_and_can_be_stopped(tmp_path: Path) -> None:
    plan = "kill i0 + kill reward, control, disk + service gone"
    (case,) = survived(tmp_path, *TWO, "--plan", plan)
    assert case["restarts"]["instance"]["killed (SIGKILL; out of memory?)"] == 1  # or more: cores are busy
    assert sum(case["restarts"]["reward"].values()) == 1
    noticed = {(each["kind"], each["name"]): each["noticed_s"] for each in case["faults"]}
    assert all(seconds is not None for seconds in noticed.values()), noticed


def test_episodes_survive_killed_environments_and_the_death_of_the_control_plane_that_they_ask(tmp_path: Path) -> None:
    (case,) = survived(tmp_path, *PLAYED, "--plan", "kill environment + kill i0, control")
    assert case["episodes"]
    noticed = {(each["kind"], each["name"]): each["noticed_s"] for each in case["faults"]}
    assert noticed["kill", "environment"] is not None, noticed


@pytest.mark.slow
def test_episodes_survive_hung_environments(tmp_path: Path) -> None:
    survived(tmp_path, *PLAYED, "--plan", "hang environment, tree, hang environment + kill trainer")


@pytest.mark.slow
def test_a_run_survives_hung_processes(tmp_path: Path) -> None:
    survived(tmp_path, *TWO, "--plan", "hang trainer, hang i1 + hang reward, slow i0 + slow trainer, hang evaluator")


@pytest.mark.slow
def test_a_run_survives_too_little_memory_and_full_shared_memory(tmp_path: Path) -> None:
    survived(tmp_path, *TWO, "--plan", "memory i0, memory trainer + shm, shm + kill trainer, memory reward")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hang", "error", "busy", "garbage", "twice", "gone"])
def test_a_run_survives_a_reward_service_that_does_not_do_its_work(tmp_path: Path, mode: str) -> None:
    survived(tmp_path, *TWO, "--plan", f"service {mode}, service {mode} + kill i0, stop")


@pytest.mark.slow
def test_deaths_of_everything_are_resumed_from_and_what_was_counted_before_stays_counted(tmp_path: Path) -> None:
    """Reward workers that were replaced counted for the attempt only."""
    (case,) = survived(tmp_path, *TWO, "--plan", "kill reward, stop, kill reward, tree, control, kill trainer, tree")
    assert sum(case["restarts"]["reward"].values()) == 2


@pytest.mark.slow
def test_random_volleys(tmp_path: Path) -> None:
    survived(tmp_path, "--faults", "30", "--seed", str(int.from_bytes(os.urandom(3), "big")))


def test_a_plan_that_names_no_fault_is_refused() -> None:
    assert plan_of("kill i0 + service gone, tree") == [[("kill", "i0"), ("service", "gone")], [("tree", "tree")]]
    with pytest.raises(ValueError, match="there is no fault 'explode'"):
        plan_of("kill i0, explode i1")
