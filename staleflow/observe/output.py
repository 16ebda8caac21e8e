"""Where a command says how it is. Nobody has to listen: when the output goes away, a run continues in silence.

open_streams()                              # first of all
out = Output(sys.stdout)
print("loads the tokenizer", file=out)      # also into a pipe that head has closed
remark("no room on the disk")               # a line of its own, on standard error
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import IO


class Output:
    """A file that never fails: silent for good after its first error, a question mark for what it cannot encode."""

    def __init__(self, file: IO[str] | Output) -> None:
        self._file = file
        self._silent = False
        self.encoding: str = getattr(file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        self._safely(lambda: self._file.write(text.encode(self.encoding, "replace").decode(self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._safely(self._file.flush)

    def _safely(self, act: Callable[[], object]) -> None:
        if self._silent:
            return
        try:
            act()
        except (OSError, ValueError):  # a broken pipe, a full disk, a closed file
            self._silent = True
            unread(self._file)


def remark(text: object) -> None:
    print(f"staleflow: {text}", file=Output(sys.stderr))


def open_streams() -> None:
    """Those that are closed, as by ``>&-``: otherwise files of the run get their numbers, and processes print there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(handle, True)
            setattr(sys, name, os.fdopen(handle, mode))


def unread(file: IO[str] | Output) -> bool:
    """Whether who read what is printed has had enough, as ``head`` has. If so, the rest goes nowhere: what is still
    held back would fail again when Python ends."""
    try:
        handle = file.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file of the system
        return False
    looks = select.poll()
    looks.register(handle, 0)
    if not any(event & select.POLLERR for _, event in looks.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, handle)
    os.close(nowhere)
    return True
