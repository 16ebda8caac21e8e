"""A real run whose trainer is several processes."""

import os
import signal
from pathlib import Path

import pytest

from staleflow.run.directory import RunDirectory
from staleflow.runtime.local.run import LocalRun
from tests.runtime.local.test_run import configured, model, run_once
from tests.training.test_sharded_kills import ranks_of

__all__ = ["model"]
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_run_survives_the_death_of_a_rank_and_resumes_on_one(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=6", "staleness=1", "training.ranks=2")
    killed: list[int] = []

    def kill(run: LocalRun) -> None:
        if run.training and not killed and run.server.ledger.version >= 2:
            killed.extend(ranks_of(run.crew.children["trainer"].pid))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    notes: list[str] = []
    summary, directory = run_once(config, model, watch=kill, tell=notes.append)
    assert len(killed) == 1
    assert sum(summary["restarts"]["trainer"].values()) == 1
    assert summary["steps"] == 6
    assert summary["groups_committed"] == 6 * config.groups, "every group is trained once"
    assert summary["violations"] == 0

    fewer = configured(model, tmp_path, "steps=8", "staleness=1", "training.ranks=1")
    summary, _ = run_once(fewer, model, RunDirectory(directory.path))
    assert summary["steps"] == 8
    assert summary["groups_committed"] == 8 * config.groups
