"""The other ranks of a sharded trainer, as the first one sees them: its child processes.

    team = Team(setup, size=2)          # they begin to load at once
    team.tell(Finish(3))                # all of them, in the order told
    team.close()

A rank that dies ends this process at once: the trainer is dead. They hold a lock together, so the ranks of the next
trainer begin when the last of these is gone.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from staleflow.errors import RunError, ending
from staleflow.frames import framed
from staleflow.servers.weights.segments import hold
from staleflow.types import Setup, Stop
from staleflow.workers.rank import MEETING

LOCK = "ranks.lock"
"""The file in the run's directory that a trainer's ranks hold."""
GONE_S = 30.0
"""How long the ranks of a trainer that died may take to be gone. They are killed with it."""
TOLD_S = 2.0
"""By how much a broken collective may be noticed before the death of the rank that broke it."""
STOP_S = 5.0
"""How long a rank that is told to stop may take."""


class Team:
    """The other ranks, as the first sees them."""

    def __init__(self, setup: Setup, size: int) -> None:
        run = Path(setup.run)
        self._files = [run / MEETING, run / LOCK]
        lock = _alone(run / LOCK)
        (run / MEETING).unlink(missing_ok=True)  # by which ranks before these met
        self._stopping = False
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "staleflow.workers.rank", str(rank), str(size), str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=[lock],
            )
            for rank in range(1, size)
        ]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        self.tell(setup)

    def tell(self, message: msgspec.Struct) -> None:
        data = framed(message)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(data)
            process.stdin.flush()

    def close(self) -> None:
        self._stopping = True
        self.tell(Stop())
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for file in self._files:
            file.unlink(missing_ok=True)

    def detach(self) -> None:
        """They end with this process. It may fail because one of them is gone: then whoever watches that one says so,
        and ends this process, while it waits here."""
        time.sleep(TOLD_S)
        self._stopping = True

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """The others would wait for a rank that is gone, in the middle of anything."""
        code = process.wait()
        if not self._stopping:
            print(f"rank {rank} of the trainer ended ({ending(code)}), and the trainer with it", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)


def _alone(path: Path) -> int:
    """The lock that this process and its children hold until the last of them is gone."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + GONE_S
    while not hold(lock, fcntl.LOCK_EX):
        if time.monotonic() > until:
            raise RunError(f"ranks of the trainer before this one still hold {path} after {GONE_S:g} s: kill them")
        time.sleep(0.02)
    return lock
