"""Whole runs that play episodes, with real processes: an untrained tiny model, real turns over HTTP, real updates."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.agents.tools import descendants
from staleflow.config import Config, load
from staleflow.config.costs import costs_from_geometry
from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.samples import read_samples
from staleflow.runtime.local.patience import run_patiently
from staleflow.runtime.local.run import LocalRun, RunError
from staleflow.tasks import calculator
from staleflow.tasks.base_model import new_model
from staleflow.tasks.calculator_model import tokenizer
from staleflow.tasks.opening import open_source, open_task
from tests.tiny_models import TINY

pytestmark = pytest.mark.processes

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    new_model(TINY, 3, len(calculator.VOCABULARY), calculator.PAD, calculator.END).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def configured(model: Path, runs: Path, *changes: str) -> Config:
    small = [f"steps={STEPS}", "groups=2", "group_size=4", "rollout.kv_tokens=2048", "evaluation.problems=4"]
    play = ["environment.play=tests.agents.environments:three_turns", "evaluation.every=0", "rollout.max_tokens=24"]
    return load("agent", [f"model={model}", f"runs={runs}", *small, *play, *changes])


def finished(config: Config, show: Callable[[LocalRun], None] = lambda _: None) -> tuple[dict[str, Any], RunDirectory]:
    source = open_source(config.data, config.seed)
    task = open_task(config.data, source, Path(config.model), config.seed, config.evaluation.problems)
    with RunDirectory.create(config, "agent").owned() as directory:
        run = LocalRun(config, directory, Path(config.model), task, costs_from_geometry(config), show=show)
        return run_patiently(run.execute()), directory


@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_episodes_of_three_turns_are_trained_under_the_bound(model: Path, tmp_path: Path, bound: int) -> None:
    summary, directory = finished(configured(model, tmp_path, f"staleness={bound}"))
    rows = read_metrics(directory.metrics)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert summary["violations"] == 0
    for sample in read_samples(directory.samples):
        given = [count for version, count in sample.versions if version < 0]
        made = [count for version, count in sample.versions if version >= 0]
        assert len(given) == 2, "between three turns"
        assert sum(given) + sum(made) == sample.tokens


def test_a_killed_environment_worker_costs_the_run_nothing(model: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(run: LocalRun) -> None:
        if not killed and run.training and run.server.ledger.version >= 1:
            for pid in descendants(os.getpid()):
                if b"staleflow.agents.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    summary, directory = finished(configured(model, tmp_path), kill)
    assert killed
    assert len(read_metrics(directory.metrics)) == STEPS
    assert summary["violations"] == 0


@pytest.mark.slow
def test_an_environment_that_always_fails_ends_the_run_with_its_reason(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "environment.play=tests.agents.environments:always_fails")
    with pytest.raises(RunError, match=r"episodes failed in a row, last: the sandbox is away .*environment\.log"):
        finished(config)
