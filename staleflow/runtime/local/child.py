"""What every process of a run begins with: ``python -m staleflow.runtime.local.child SOCKET NAME INCARNATION RUN``.

It connects to the control plane at the socket, says its name, and gets a ``Setup``. It takes its place among the cores,
loads what its role needs, says ``Ready``, and serves until it is told to stop, or until there has been no control plane
for a while. The run's directory is among the arguments for those who look for its processes (``run/processes.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

from staleflow.errors import ConfigError
from staleflow.runtime.local.link import LastingLink
from staleflow.types import Broken, Setup
from staleflow.workers.link import Gone, Link
from staleflow.workers.own_engine import FirstTokenError
from staleflow.workers.roles import build

START_S = 60.0
PARENT = "STALEFLOW_PARENT"
"""The pid of a parent to die with. Without it, a process outlives who started it."""
PR_SET_PDEATHSIG = 1


def main(path: str, name: str, incarnation: str) -> None:
    if parent := os.environ.get(PARENT):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("who started this process is dead")
    serve(LastingLink(path, name, int(incarnation)))


def serve(link: Link) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the control plane decides when to stop
    try:
        setup = next(iter(link.receive(START_S)), None)
    except Gone:
        return
    if not isinstance(setup, Setup):
        sys.exit(f"no set-up came within {START_S:g} s")
    take_place(setup)
    with contextlib.suppress(Gone):
        with saying(link, ValueError):  # what the user can put right: a model, a file, a setting
            work = build(setup, link)
        with saying(link, ConfigError):  # anything else may pass, also an engine's ValueError: another one takes over
            work()


@contextlib.contextmanager
def saying(link: Link, final: type[ValueError]) -> Iterator[None]:
    """Errors of this kind are told in one line, and no other process is started for this one."""
    try:
        yield
    except final as error:
        with contextlib.suppress(Gone):
            link.send(Broken(str(error), first=isinstance(error, FirstTokenError)))
        raise


def take_place(setup: Setup) -> None:
    if setup.cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # cores may have been taken away since they were counted
            os.sched_setaffinity(0, setup.cores)
    if setup.nice:
        os.nice(setup.nice)
    import torch

    torch.set_num_threads(setup.threads)


if __name__ == "__main__":
    main(*sys.argv[1:4])
