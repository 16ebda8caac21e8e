"""A trainer that dies with its machine's memory, as on a node that loses its power: the steps since the newest
checkpoint are made again from the journal, and no group is trained twice."""

import os
import signal
from pathlib import Path

import pytest

from staleflow.observe.metrics import read_metrics
from staleflow.run.checkpoints import newest, wrong_with
from staleflow.runtime.local.run import LocalRun
from staleflow.servers.weights import standby_of
from staleflow.servers.weights.segments import StoreRegistry
from staleflow.servers.weights.slots import segments_of
from tests.runtime.local.test_run import configured, model, run_once

__all__ = ["model"]
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_trainer_that_cannot_be_revived_makes_the_steps_since_the_checkpoint_again(
    model: Path, tmp_path: Path
) -> None:
    """It came back before the present version, and was fed as if it were there."""
    config = configured(model, tmp_path, "steps=9", "staleness=1", "checkpoints.every=3")
    lost: list[int] = []
    notes: list[str] = []

    def lose(run: LocalRun) -> None:
        if not run.training or run.server.ledger.version < 5 or lost:
            return
        lost.append(run.server.ledger.version)
        for child in run.crew.children.values():
            os.kill(child.pid, signal.SIGKILL)
        registry = StoreRegistry()
        for name in (run.directory.store, standby_of(run.directory.store)):
            registry.remove(name, segments_of(registry.control(name).read_bytes()) or [])

    summary, directory = run_once(config, model, watch=lose, tell=notes.append)
    assert any(note.endswith("the steps since then are made again") for note in notes), notes
    assert [row["step"] for row in read_metrics(directory.metrics)] == list(range(9))
    assert summary["groups_committed"] == 9 * config.groups
    assert summary["violations"] == 0
    assert summary["restarts"]["trainer"] == {"killed (SIGKILL; out of memory?)": 1}
    latest = newest(directory.checkpoints)
    assert latest is not None
    assert latest.name == "step-000009"
    assert wrong_with(latest) == ""
