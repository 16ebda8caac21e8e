"""What every process of a run begins with: ``python -m staleflow.runtime.local.child FD``.

The socket ``FD`` brings a ``Setup`` first. The process takes its place among the cores, loads what its role needs, says
``Ready``, and serves until it is told to stop or the control plane is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from staleflow.runtime.local.link import SocketLink
from staleflow.types import Broken, Setup, ToProcess
from staleflow.workers.link import Gone
from staleflow.workers.roles import build

START_S = 60.0


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the control plane decides when to stop
    link = SocketLink(socket.socket(fileno=descriptor), ToProcess)
    setup = next(iter(link.receive(START_S)), None)
    if not isinstance(setup, Setup):
        sys.exit(f"no set-up came within {START_S:g} s")
    take_place(setup)
    try:
        build(setup, link)()
    except Gone:
        return
    except ValueError as error:  # what the user can put right, in one line
        with contextlib.suppress(Gone):
            link.send(Broken(str(error)))
        raise


def take_place(setup: Setup) -> None:
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # cores may have been taken away since they were counted
            os.sched_setaffinity(0, setup.cores)
    if setup.nice:
        os.nice(setup.nice)
    import torch

    torch.set_num_threads(setup.threads)


if __name__ == "__main__":
    main(int(sys.argv[1]))
