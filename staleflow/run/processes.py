"""The processes of runs on this machine, found by what they were started with: no list is kept that could be wrong.

    for each in processes(run): each.name, each.pid
    end(processes(run))

They outlive the control plane that started them for a while, so that another one can take over. Only where there is
``/proc``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from staleflow.types import Role

MODULE = "staleflow.runtime.local.child"
"""What a process runs: ``python -m MODULE SOCKET NAME INCARNATION RUN``."""


GONE_S = 10.0
"""How long killed processes may take to be gone."""


class Process(NamedTuple):
    name: str
    incarnation: int
    pid: int
    parent: int
    run: Path

    @property
    def role(self) -> Role:
        return self.name if self.name in ("trainer", "evaluator") else "instance"


def processes(run: Path | None = None) -> Iterator[Process]:
    """Those of this run, or of all runs of this user."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
            if len(words) < 7 or words[-6:-4] != ["-m", MODULE] or folder.stat().st_uid != os.getuid():
                continue
            *_, name, incarnation, where = words
            state, parent, *_ = _stat(folder)
            if state not in "ZX" and (run is None or Path(where) == run):
                yield Process(name, int(incarnation), int(folder.name), int(parent), Path(where))


def supervised(process: Process) -> bool:
    """Whether a supervisor has inherited it, which starts another control plane."""
    with suppress(OSError):
        words = Path(f"/proc/{process.parent}/cmdline").read_bytes().split(b"\0")
        return b"train" in words and any(word.endswith(b"staleflow") for word in words)
    return False


def end(left: Iterable[Process]) -> None:
    """Kill them with everything they started, and wait until they are gone, with every lock that they held."""
    groups = {each.pid for each in left}
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + GONE_S
    while _any_left(groups) and time.monotonic() < until:
        time.sleep(0.02)


def _any_left(groups: set[int]) -> bool:
    """Whether a thread of these process groups has not ended. ``processes`` sees less: of one that is dying, the memory
    goes first, with its command line, and its files are closed last, by whichever of its threads ends last."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(_stat(folder)[2]) in groups and any(state not in "ZX" for state in _states(folder)):
                return True
    return False


def _states(folder: Path) -> Iterator[str]:
    """Of each thread that is there."""
    for thread in folder.glob("task/*"):
        with suppress(OSError):
            yield _stat(thread)[0]


def _stat(folder: Path) -> list[str]:
    """What the kernel says of a process or thread after its name: state, parent, process group and more."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
