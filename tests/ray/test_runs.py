"""Runs on a Ray cluster: processes, actors, nodes and control plane are killed, and what is left is audited."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.chaos_audit import audit
from bench.chaos_lab import Victim
from bench.node_deaths import case
from bench.ray_nodes import START_S, Node, Nodes, node_of
from staleflow.servers.weights.segments import StoreRegistry

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
pytestmark = pytest.mark.processes

SETTINGS = (
    "laptop",
    "runtime=ray",
    "groups=4",
    "group_size=4",
    "rollout.max_tokens=48",
    "evaluation.problems=8",
    "evaluation.every=0",
    "checkpoints.every=4",
)
Fault = Callable[[Victim], None]


@pytest.fixture
def workers(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Node]]:
    """Two nodes, by address. The control plane is on the first, which has no room for anything else."""
    for name, value in nodes.environment.items():
        monkeypatch.setenv(name, value)
    added = [nodes.add(), nodes.add()]
    yield {node.host: node for node in added}
    for node in added:
        nodes.kill(node)


def ran(folder: Path, steps: int, *faults: Fault, more: tuple[str, ...] = ()) -> Victim:
    """A run that has ended well, with these faults some steps after one another."""
    victim = Victim([*SETTINGS, f"steps={steps}", *more], folder)
    victim.start()
    for fault in faults:
        since = victim.version
        victim.wait(lambda since=since: victim.version >= since + 3, "steps")
        fault(victim)
    assert victim.ended(280) == 0, "\n".join(each.line for each in victim.said[-30:])
    assert victim.run is not None
    found = audit(victim.run, victim.summary)
    assert found.well, found
    assert victim.summary["steps"] == steps
    assert victim.summary["violations"] == 0
    assert not victim.left_behind()
    assert not [each.name for each in StoreRegistry().folder.iterdir() if each.name.startswith(victim.run.name)]
    return victim


def restarts(victim: Victim, role: str) -> int:
    return sum(victim.summary["restarts"].get(role, {}).values())


def killed(name: str) -> Fault:
    return lambda victim: os.kill(victim.pids(name)[0], signal.SIGKILL)


def actor_killed(name: str) -> Fault:
    """The actor is the parent of the role's process."""

    def kill(victim: Victim) -> None:
        stat = Path(f"/proc/{victim.pids(name)[0]}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)

    return kill


def driver_killed(victim: Victim) -> None:
    os.kill(victim.control, signal.SIGKILL)


def test_a_cluster_of_its_own_lives_as_long_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With deaths of a process, of an actor and of the control plane, after which the cluster is joined again."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    victim = ran(tmp_path, 16, killed("i0"), actor_killed("i1"), driver_killed, killed("trainer"))
    assert restarts(victim, "instance") == 2
    assert restarts(victim, "control") == 1
    assert restarts(victim, "trainer") == 1
    run = tmp_path / "latest"
    logs = {each.name for each in (run / "logs").iterdir()}
    assert {"i0.log", "i1.log", "trainer.log", "evaluator.log", "ray.log", "ray"} <= logs
    assert not {"head.json", "control.json", "weights.json"} & {each.name for each in run.iterdir()}


@pytest.mark.slow
def test_instances_are_on_both_nodes_and_a_dead_node_is_a_dead_instance(
    tmp_path: Path, nodes: Nodes, workers: dict[str, Node]
) -> None:
    where: dict[str, str] = {}

    def lose(victim: Victim) -> None:
        where.update((name, node_of(victim.pids(name)[0])) for name in ("i0", "i1", "trainer"))
        nodes.kill(workers[next(host for name, host in where.items() if host != where["trainer"])])

    victim = ran(tmp_path, 16, lose)
    assert where["i0"] != where["i1"]
    assert restarts(victim, "instance") == 1
    assert restarts(victim, "trainer") == 0


@pytest.mark.slow
def test_a_trainer_that_lost_its_node_makes_the_steps_since_the_checkpoint_again(
    tmp_path: Path, nodes: Nodes, workers: dict[str, Node]
) -> None:
    victim = ran(tmp_path, 14, lambda victim: nodes.kill(workers[node_of(victim.pids("trainer")[0])]))
    assert restarts(victim, "trainer") == 1
    assert any("are made again" in each.line for each in victim.said)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_the_control_plane_may_die_on_a_cluster_that_was_joined(tmp_path: Path) -> None:
    victim = ran(tmp_path, 12, driver_killed)
    assert restarts(victim, "control") == 1
    assert restarts(victim, "instance") == restarts(victim, "trainer") == 0


@pytest.mark.slow
def test_nodes_die_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")  # set anew by the case
    found = case(seed=3, kills=2)
    assert found["well"], found
    assert len(found["kills"]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("nodes")
def test_a_job_can_be_submitted_while_another_cluster_is_on_the_machine(tmp_path: Path) -> None:
    """All agents of a machine listen at one port of the loopback address, unless they are told otherwise. The second
    one gave up, and the cluster took no jobs."""
    with Nodes(head_cpus=8, dashboard=True) as nodes:
        words = [*SETTINGS, "steps=3", f"runs={tmp_path}", "--json"]
        command = [sys.executable, "-m", "staleflow", "train", *words]
        submit = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", nodes.dashboard, "--"]
        environment, until = os.environ | nodes.environment, time.monotonic() + START_S
        while True:
            told = subprocess.run([*submit, *command], capture_output=True, text=True, env=environment, check=False)
            if "No available agent" not in told.stderr or time.monotonic() > until:  # a node that has just started
                break
        assert told.returncode == 0, told.stdout + told.stderr
        summary: dict[str, Any] = json.loads((tmp_path / "latest" / "summary.json").read_text())
        assert summary["steps"] == 3
