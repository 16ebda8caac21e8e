"""Ranks of a sharded trainer die: the trainer dies with any of them, leaves nobody behind, and its successor continues
as if nobody had died."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from staleflow.config import load
from staleflow.training.build import build
from staleflow.training.checkpoints import load as load_checkpoint
from staleflow.types import Feed, Finish, Pushed, Ready
from tests.training.test_standby_kills import Watcher, end, kill_trainers, model, new_run, step, undisturbed
from tests.training.trainer_process import TrainerProcess

__all__ = ["model", "new_run"]
pytestmark = pytest.mark.processes

OPTIONS = ("training.learning_rate=0.01", "training.ranks=2")
END_S = 60.0


def ranks_of(leader: int) -> Iterator[int]:
    """The processes of the other ranks that live."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if int(parent) == leader and b"staleflow.workers.rank" in words and state not in "ZX":
                yield int(folder.name)


def assert_gone(pids: list[int]) -> None:
    until = time.monotonic() + END_S
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < until, f"{pids} are still there"
        time.sleep(0.01)


FIRST_TO_NOTICE = """
import subprocess, threading
from staleflow.workers.team import Team
rank = subprocess.Popen(["sleep", "600"])
team = Team.__new__(Team)
team._stopping = False
threading.Thread(target=team._watch, args=(1, rank), daemon=True).start()
rank.kill()
team.detach()
"""


def test_a_rank_whose_death_breaks_a_collective_before_it_is_noticed_is_named_all_the_same() -> None:
    told = subprocess.run([sys.executable, "-c", FIRST_TO_NOTICE], capture_output=True, text=True, check=False)
    assert (told.returncode, "rank 1 of the trainer ended (killed (SIGKILL" in told.stderr) == (1, True), told.stderr


def test_a_rank_that_dies_in_the_middle_of_a_step_ends_the_trainer_and_the_step_is_made_once(
    new_run: Callable[..., Path], model: Path
) -> None:
    run = new_run("a", *OPTIONS)
    watcher, first = Watcher(run, model), TrainerProcess(run, model, standby=False)
    assert first.hear_kind(Ready).version == 0
    for number in range(2):
        first.send([Feed(number, step(number)), Finish(number)])
        watcher.look(first.hear_kind(Pushed).version)
    (rank,) = ranks_of(first.process.pid)
    os.kill(rank, signal.SIGSTOP)  # the first rank waits for it in the middle of the step
    first.send([Feed(2, step(2)), Finish(2)])
    os.kill(rank, signal.SIGKILL)
    first.end()
    assert first.process.exitcode == 1
    assert "rank 1 of the trainer ended (killed (SIGKILL" in (run / "trainer.log").read_text()

    second = TrainerProcess(run, model, standby=True)
    assert second.hear_kind(Ready).version == 2
    watcher.look(2)
    second.send([Feed(2, step(2)), Finish(2)])
    watcher.look(second.hear_kind(Pushed).version)
    others = list(ranks_of(second.process.pid))
    end(run, second)
    assert_gone(others)
    assert not list(run.glob("ranks*"))

    config = load(str(run / "config.yaml"), [])
    base, expected, resumed = (build(model, config.trainer_options()) for _ in range(3))
    for number in range(3):
        expected.feed(number, step(number))
        expected.finish(number)
    assert load_checkpoint(resumed, run / "last") == 3, "on one rank"
    for start, one, other in zip(base.parameters, expected.parameters, resumed.parameters, strict=True):
        # Adam turns the rounding of a tiny gradient into a whole step; a step made twice would be some thirds
        assert torch.linalg.norm(one - other) <= 0.01 * torch.linalg.norm(one - start)


@pytest.mark.slow
def test_ranks_do_not_outlive_the_first(new_run: Callable[..., Path], model: Path) -> None:
    run = new_run("a", *OPTIONS)
    trainer = TrainerProcess(run, model, standby=False)
    trainer.hear_kind(Ready)
    others = list(ranks_of(trainer.process.pid))
    assert len(others) == 1
    os.kill(others[0], signal.SIGSTOP)  # it cannot notice by itself
    trainer.kill()
    assert_gone(others)


@pytest.mark.slow
def test_killed_sharded_trainers_lose_nothing(new_run: Callable[..., Path], model: Path) -> None:
    expected, last, step_s = undisturbed(new_run("a", *OPTIONS), model, 4)
    assert len(set(expected.values())) == len(expected)
    assert kill_trainers(new_run("b", *OPTIONS), model, expected, last, step_s, random.Random(1)) > 0
