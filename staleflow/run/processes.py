"""The processes of runs on this machine, found by what they were started with: no list is kept that could be wrong.

    for each in processes(run): each.name, each.pid

They outlive the control plane that started them for a while, so that another one can take over. Only where there is
``/proc``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MODULE = "staleflow.runtime.local.child"
"""What a process runs: ``python -m MODULE SOCKET NAME INCARNATION RUN``."""


class Process(NamedTuple):
    name: str
    incarnation: int
    pid: int
    parent: int
    run: Path


def processes(run: Path | None = None) -> Iterator[Process]:
    """Those of this run, or of all runs of this user."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
            if len(words) < 7 or words[-6:-4] != ["-m", MODULE] or folder.stat().st_uid != os.getuid():
                continue
            *_, name, incarnation, where = words
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX" and (run is None or Path(where) == run):
                yield Process(name, int(incarnation), int(folder.name), int(parent), Path(where))
