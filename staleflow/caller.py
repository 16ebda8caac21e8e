"""The Python program that started this command through ``staleflow.api``, if one did, and the folder it listens in.

    folder = in_folder("rewards")       # the path of something of its own; None: the command was started by hand
    tell("run", str(directory.path))    # for the program to read

The folder belongs to that program alone (mode 0700) and ends with it. It is named in the environment, so that every
process of the command knows it.
"""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

from staleflow.files import write_whole

VARIABLE = "STALEFLOW_CALLER"
RUN, ERROR, REWARDS, STOPPED = "run", "error.json", "rewards", "stopped"
"""What is in the folder: the run's directory, why the command failed, the socket of the program's own rewards, and the
exception for which the program stops the command."""


PR_SET_PDEATHSIG = 1


def end_with_it() -> None:
    """If the program is killed, this process is asked to end in good order. Linux only."""
    if os.environ.get(VARIABLE):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def in_folder(name: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    return Path(folder) / name if folder else None


def stopped_by(signalled: str) -> str:
    """The program rather than the signal, if it sent it because of an exception of its own."""
    path = in_folder(STOPPED)
    if signalled == signal.SIGTERM.name and path is not None and path.is_file():
        return f"the program that called it ({path.read_text(encoding='utf-8')})"
    return signalled


def tell(name: str, text: str) -> bool:
    """Whether there is a program to tell it to."""
    path = in_folder(name)
    if path is None or not path.parent.is_dir():
        return False
    write_whole(path, text)
    return True
