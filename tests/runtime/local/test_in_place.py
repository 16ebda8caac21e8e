"""The control plane is killed, and another takes over in place: processes stay, nothing is lost or made again."""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from staleflow.config import Config
from staleflow.config.costs import costs_from_geometry
from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.processes import Process
from staleflow.runtime.local.patience import run_patiently
from staleflow.runtime.local.run import LocalRun
from staleflow.runtime.local.site import LocalSite
from staleflow.runtime.local.supervisor import STORED, Supervisor
from staleflow.servers.weights import reclaim, standby_of
from staleflow.servers.weights.parameter_server import LocalParameterServer
from tests.runtime.local.command import Training
from tests.runtime.local.synchronous import train
from tests.runtime.local.test_run import GROUPS, committed, configured, model, plain, task_of

__all__ = ["model"]
pytestmark = pytest.mark.processes
KILLED = "killed (SIGKILL; out of memory?)"


def words(model: Path, runs: Path, *changes: str) -> list[str]:
    """The command's, for a configuration of the other tests."""
    from staleflow.config import to_yaml

    file = runs.with_name("config.yaml")
    file.write_text(to_yaml(configured(model, runs, *changes)))
    return [str(file)]


@pytest.mark.slow
def test_at_bound_0_a_run_whose_control_plane_is_killed_again_and_again_equals_the_synchronous_loop(
    model: Path, tmp_path: Path
) -> None:
    """Right after a commit that is not durable yet; again before the next one has taken over; and with an instance."""
    runs = tmp_path / "runs"
    run = Training(runs, *words(model, runs, "steps=8"))
    run.until(lambda: run.steps >= 2)
    before, first = run.roles, run.control
    run.kill(first)
    run.until(lambda: run.control not in (0, first))
    second = run.control
    run.kill(second)
    run.until(lambda: run.steps >= 5 and run.control not in (0, second))
    assert run.roles == before
    assert not run.control_has_pytorch, "it takes over the sooner"
    run.kill(run.control, before["i0"])
    summary = run.summary()
    losses, batches = train(plain(configured(model, runs), model), steps=8)
    rows = read_metrics(run.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-6)
    for row, batch in zip(rows, batches, strict=True):
        assert sorted(row["lengths"]) == sorted(length for group in batch for length in group)
    assert summary["restarts"]["control"] == {KILLED: 3}
    assert "trainer" not in summary["restarts"]
    assert summary["groups_committed"] == summary["groups_admitted"] == 8 * GROUPS
    assert summary["groups_released"] == {}
    assert run.roles == {}


@pytest.mark.slow
def test_a_resume_adopts_the_processes_of_a_run_whose_supervisor_is_dead_as_well(model: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    dead = Training(runs, *words(model, runs, "steps=10", "staleness=2"))
    dead.until(lambda: dead.steps >= 3)
    before = dead.roles
    dead.kill(dead.process.pid, dead.control)
    run = Training(runs, "--resume", str(dead.run))
    run.until(lambda: run.steps >= 5)
    assert run.roles == before
    summary = run.summary()
    rows = read_metrics(run.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(10))
    assert summary["groups_committed"] == 10 * GROUPS
    assert summary["max_staleness"] <= 2
    assert summary["restarts"] == {"control": {"not known how": 1}}
    prompts = [prompt for row in rows for prompt in row["prompts"]]
    assert len(set(prompts)) == len(prompts) == 10 * GROUPS
    trained = committed(RunDirectory(run.run).journal(1))
    assert len(trained) == len(set(trained)) == 10 * GROUPS
    assert run.roles == {}


@pytest.mark.slow
def test_a_resume_with_other_settings_of_a_role_replaces_the_processes_that_were_started_without_them(
    model: Path, tmp_path: Path
) -> None:
    """The trainer that was there went on with the old ones, and nobody said so."""
    runs = tmp_path / "runs"
    dead = Training(runs, *words(model, runs, "steps=8", "staleness=2"))
    dead.until(lambda: dead.steps >= 3)
    before = dead.roles
    dead.kill(dead.process.pid, dead.control)
    run = Training(runs, "--resume", str(dead.run), "training.micro_tokens=64")
    run.until(lambda: run.steps >= 5)
    changed = {name for name, pid in run.roles.items() if before[name] != pid}
    assert changed == {"trainer"}
    assert run.summary()["restarts"] == {"control": {"not known how": 1}}
    rows = read_metrics(run.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert run.roles == {}


class Brief(LocalRun):
    """It takes the run in hand, and that is all."""

    async def _run(self) -> None:
        pass


def test_a_control_plane_says_that_its_settings_are_stored(model: Path, tmp_path: Path) -> None:
    """Otherwise the next one applies the words of a resume again, over what was scaled since."""
    config = configured(model, tmp_path / "runs")
    directory, (told, tells), (hears, says) = RunDirectory.create(config, "test"), os.pipe(), os.pipe()
    cost, supervisor = costs_from_geometry(config), Supervisor(tells, hears)
    run = Brief(config, directory, model, task_of(config, model), cost, supervisor=supervisor)
    run_patiently(run.execute())
    said = os.read(told, 1 << 16).decode().splitlines()
    for each in (told, tells, hears, says):
        os.close(each)
    assert said[:2] == [str(directory.path), STORED]


def test_processes_started_with_other_settings_end_before_the_new_ones_are_written(model: Path, tmp_path: Path) -> None:
    """A control plane that died in between was followed by one that took them for processes with the new settings."""
    before, after = (configured(model, tmp_path / "runs", f"training.micro_tokens={count}") for count in (512, 64))
    directory, ended = RunDirectory.create(before, "test"), list[tuple[set[str], int]]()

    class Left(LocalSite):
        def left(self) -> list[Process]:
            return [Process(name, 1, 0, 0, directory.path) for name in ("trainer", "i0", "evaluator")]

        def end(self, left: Iterable[Process]) -> None:
            _, written = RunDirectory.existing(directory.path)
            ended.append(({each.name for each in left}, written.training.micro_tokens))

    site = Left(directory, after)
    run = LocalRun(after, directory, model, task_of(after, model), costs_from_geometry(after), site=site)
    run._opened().journal.close()  # pyright: ignore[reportPrivateUsage]
    assert ended[0] == ({"trainer"}, 512)
    assert RunDirectory.existing(directory.path)[1] == after


class Attempt:
    """What one that died left of version 0: a journal, and stores that its trainer and an instance hold."""

    def __init__(self, config: Config, model: Path) -> None:
        self.directory = RunDirectory.create(config, "test")
        self.names = self.directory.store, standby_of(self.directory.store)
        self.trainer, self.instance = ExitStack(), ExitStack()
        run = LocalRun(config, self.directory, model, task_of(config, model), costs_from_geometry(config))
        run._opened().journal.close()  # pyright: ignore[reportPrivateUsage]
        for name in self.names:
            store = LocalParameterServer.create(name)
            self.trainer.callback(store.detach)
            store.push(0, {"w": torch.zeros(3)})
        self.instance.callback(LocalParameterServer.attach(self.directory.store).detach)


def test_what_a_trainer_leaves_that_ends_for_new_settings_is_not_reclaimed_by_another_run(
    model: Path, tmp_path: Path
) -> None:
    """It alone held the state for its successor: then all steps were made again, by new processes."""
    before, after = (configured(model, tmp_path / "runs", f"training.micro_tokens={count}") for count in (512, 64))
    dead = Attempt(before, model)

    class Left(LocalSite):
        def left(self) -> list[Process]:
            return [Process(name, 1, 0, 0, self.directory.path) for name in ("trainer", "i0")]

        def end(self, left: Iterable[Process]) -> None:
            if any(each.name == "trainer" for each in left):
                dead.trainer.close()
                assert not set(dead.names) & set(reclaim()), "as another run does when it begins"

    notes, site = list[str](), Left(dead.directory, after)
    task, cost = task_of(after, model), costs_from_geometry(after)
    run = Brief(after, dead.directory, model, task, cost, tell=notes.append, site=site)
    run_patiently(run.execute())
    assert "continues at version 0, from shared memory and the journal: no step is made again" in notes
    assert run.in_place
    dead.instance.close()


def test_weights_that_dying_processes_still_hold_do_not_refuse_a_new_trainer(model: Path, tmp_path: Path) -> None:
    """Nothing can be continued with; an instance that was killed has the weights open for a moment more."""
    config = configured(model, tmp_path / "runs")
    dead = Attempt(config, model)
    dead.trainer.close()
    LocalParameterServer.take_over(dead.names[1]).close()

    class Begins(Brief):
        async def _run(self) -> None:
            LocalParameterServer.create(dead.directory.store).detach()

    run_patiently(Begins(config, dead.directory, model, task_of(config, model), costs_from_geometry(config)).execute())
    dead.instance.close()
    assert not set(dead.names) & set(reclaim()), "nothing is left when a run has ended"
