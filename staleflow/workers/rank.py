"""A rank of a sharded trainer beside the first: ``python -m staleflow.workers.rank RANK SIZE LEADER``.

It gets a ``Setup`` and then what to do over its standard input, from the first rank (process ``LEADER``), and takes
part in it: all ranks do the same things in the same order. It says nothing to anybody else, and does not outlive the
first: the kernel kills it when that dies, and the end of its input ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from staleflow.frames import Frames
from staleflow.readable import readable
from staleflow.types import Feed, Finish, Reset, Setup, Stop

PIECE = 1 << 20
FAREWELL_S = 10.0
"""How long a rank that cannot continue waits for the first to end by itself: that says why, if it failed alike."""
DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux."""
MEETING = "ranks"
"""The file in the run's directory by which ranks find each other."""


class Flush(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Begin with the groups that wait."""


class Push(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write the present version to the parameter server."""


class Keep(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Copy the state for a successor, beside the next step."""


class Revive(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Take the state that a trainer before this one left."""


class Write(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write the tensors of a checkpoint into this folder."""

    folder: str


class Load(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Take the state of this checkpoint."""

    folder: str


ToRank = Setup | Feed | Flush | Finish | Reset | Push | Keep | Revive | Write | Load | Stop


def main(rank: int, size: int, leader: int) -> None:
    die_with(leader)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = received(sys.stdin.fileno())
    setup = next(commands, None)
    if not isinstance(setup, Setup):
        return
    try:
        follow(setup, rank, size, commands)
    except Exception:
        traceback.print_exc()
        wait_for_the_end(sys.stdin.fileno())
        os._exit(1)  # the others may wait in a collective: there is nothing to take leave of
    os._exit(0)


def die_with(leader: int) -> None:
    """Let the kernel kill this process when the first rank dies, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != leader:
        os._exit(1)  # it died before that


def received(end: int) -> Iterator[Any]:
    """Messages until the other end is closed."""
    frames: Frames[Any] = Frames(ToRank)
    while data := os.read(end, PIECE):
        yield from frames.feed(data)


def wait_for_the_end(end: int) -> None:
    until = time.monotonic() + FAREWELL_S
    with contextlib.suppress(OSError):
        while (left := until - time.monotonic()) > 0 and readable([end], left) and os.read(end, PIECE):
            pass


def follow(setup: Setup, rank: int, size: int, commands: Iterator[Any]) -> None:
    import torch

    from staleflow.config import load
    from staleflow.servers.weights import standby_of
    from staleflow.training import sharded_checkpoints
    from staleflow.training.build import read_model
    from staleflow.training.ranks import meet
    from staleflow.training.sharded import ShardedTrainer
    from staleflow.training.sharded_store import RankedServer
    from staleflow.training.standby import Standby

    config = load(str(Path(setup.run) / "config.yaml"), [])
    torch.set_num_threads(max(1, setup.threads // size))
    options = config.trainer_options()
    model = read_model(setup.model)
    ranks = meet(rank, size, Path(setup.run) / MEETING, options.device)
    trainer = ShardedTrainer(model, options, ranks)
    weights = RankedServer(ranks, setup.store)
    standby = Standby(RankedServer(ranks.beside(), standby_of(setup.store)), folder=None)
    for command in commands:
        match command:
            case Feed(step=step, groups=groups):
                trainer.feed(step, groups)
            case Flush():
                trainer.flush()
            case Finish(step=step):
                standby.wait()
                trainer.finish(step)
            case Reset():
                trainer.reset()
            case Push():
                weights.push(trainer.version, trainer.weights())
            case Keep():
                standby.copy(trainer)
            case Revive():
                standby.revive(trainer)
            case Write(folder=folder):
                with contextlib.suppress(OSError):  # the first rank hears of it too, and says so
                    sharded_checkpoints.write(trainer, Path(folder))
            case Load(folder=folder):
                sharded_checkpoints.load(trainer, folder)
            case _:
                return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
