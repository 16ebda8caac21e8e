"""The death of every process at once: what the journal has is used, and at bound 0 nobody could tell."""

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.processes import processes
from staleflow.servers.weights import NoStoreError, WeightsError, reclaim, standby_of
from staleflow.servers.weights.parameter_server import LocalParameterServer
from tests.runtime.local.synchronous import train
from tests.runtime.local.test_run import GROUPS, committed, configured, model, plain, run_once

__all__ = ["model"]
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@contextmanager
def doomed(
    directory: RunDirectory, model: Path, version: int, after_s: float = 0.0, checkpoint: str = ""
) -> Generator[str]:
    """An attempt that is killed, and what it said. What it leaves in shared memory is held: other runs on this machine
    would reclaim it."""
    what = [str(directory.path), str(model), str(version), str(after_s), checkpoint]
    command = [sys.executable, "-m", "tests.runtime.local.doomed", *what]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        ExitStack() as held,
    ):
        missing = [directory.store, standby_of(directory.store)]
        while process.poll() is None and missing:
            with suppress(WeightsError):
                held.enter_context(closing(LocalParameterServer.attach(missing[0])))
                del missing[0]
            time.sleep(0.02)
        said, errors = process.communicate(timeout=300)
        assert process.returncode == -9, errors
        while any(processes(directory.path)):  # those that were killed first take a moment to end
            time.sleep(0.02)
        yield said


def taken(directory: RunDirectory) -> None:
    """What it left in shared memory is reclaimed, as by another run on the machine. The kernel may take a moment to
    release what killed processes had locked, although they are seen no more."""
    until = time.monotonic() + 60
    for store in (directory.store, standby_of(directory.store)):
        with suppress(NoStoreError):
            while time.monotonic() < until:
                reclaim()
                LocalParameterServer.attach(store).close()
                time.sleep(0.02)
            raise AssertionError(f"{store} is still there")


def test_bound_0_equals_the_plain_loop_across_deaths_of_the_whole_tree(model: Path, tmp_path: Path) -> None:
    """Continued from shared memory, from the journal and the base model, from the journal and a checkpoint."""
    config = configured(model, tmp_path, "steps=10", "checkpoints.every=5")
    directory = RunDirectory.create(config, "test")
    with doomed(directory, model, 2) as said, doomed(directory, model, 3) as then:
        assert "continues" not in said
        assert "from shared memory and the journal: no step is made again" in then
    taken(directory)
    with doomed(directory, model, 7, checkpoint="step-000005") as said:  # which is written beside the steps
        assert "made again, without decoding, from the base model" in said
    taken(directory)
    notes: list[str] = []
    summary, _ = run_once(config, model, directory, tell=notes.append)
    assert any("made again, without decoding, from checkpoint step-000005" in note for note in notes), notes
    losses, batches = train(plain(config, model), steps=10)
    rows = read_metrics(directory.metrics)
    assert len(directory.metrics.read_text().splitlines()) == len(rows) == 10, "no line twice"
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-6)
    for row, batch in zip(rows, batches, strict=True):
        assert sorted(row["lengths"]) == sorted(length for group in batch for length in group)
    assert summary["lives"] == 4
    assert len(summary["rewards"]) == 10
    assert summary["rewards"] == [row["reward"] for row in rows]
    assert summary["groups_committed"] == summary["groups_admitted"] == 10 * GROUPS
    assert summary["accuracy"][0]["step"] == 0
    trained = committed(directory.journal())
    assert len(trained) == len(set(trained)) == 10 * GROUPS


def test_no_prompt_is_skipped_or_repeated_when_trees_die_at_random_moments(model: Path, tmp_path: Path) -> None:
    random = Random(7)
    config = configured(model, tmp_path, "steps=10", "staleness=2", "checkpoints.every=3")
    directory = RunDirectory.create(config, "test")
    with ExitStack() as held:
        for version in (2, 4, 7):
            held.enter_context(doomed(directory, model, version, random.random()))
            if random.random() < 0.6:
                held.close()
                reclaim()
        summary, _ = run_once(config, model, directory)
    trained = committed(directory.journal())
    assert len(trained) == len(set(trained)) == 10 * GROUPS
    rows = read_metrics(directory.metrics)
    prompts = [prompt for row in rows for prompt in row["prompts"]]
    assert sorted(prompts) == sorted({int(name[1:]) for name in trained})
    assert [row["step"] for row in rows] == list(range(10))
    assert sum(summary["staleness_histogram"].values()) == sum(sum(row["lengths"]) for row in rows)
    assert summary["max_staleness"] <= 2
    assert summary["violations"] == 0


def test_a_damaged_journal_is_left_for_the_checkpoint_and_said_in_one_line(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "steps=3")
    _, directory = run_once(config, model)
    directory.journal().write_bytes(b"not a journal" * 1000)
    said: list[str] = []
    changed = configured(model, tmp_path, "steps=4")
    summary, _ = run_once(changed, model, directory, tell=said.append)
    assert any(line.startswith("continues from checkpoint step-000003 alone") for line in said)
    assert not directory.journal().exists()
    assert directory.journals == [2]
    assert summary["steps"] == 4
    assert summary["lives"] == 2
    losses, _ = train(plain(config, model), steps=4)
    assert [row["loss"] for row in read_metrics(directory.metrics)] == pytest.approx(losses, abs=1e-6)
