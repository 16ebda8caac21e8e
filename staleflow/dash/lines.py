"""A file of lines that grows, is cut by a resumed run, or is replaced by a new one (``BoundedLog``), read on.

lines = Lines(directory.metrics)
again, new = lines.read()       # again: what was read before does not count any more
"""

import os
from pathlib import Path

from staleflow.run.bounded_log import older

READ_BYTES = 8 << 20


class Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._which = 0
        self._before = older(path).read_bytes().splitlines() if older(path).exists() else []

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file has become shorter, and the new whole lines."""
        if self._before:
            before, self._before = self._before, []
            return False, before
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                again = status.st_ino == self._which and status.st_size < self._offset
                if status.st_ino != self._which or again:
                    self._which, self._offset = status.st_ino, 0
                if status.st_size <= self._offset:
                    return again, []
                file.seek(self._offset)
                text = file.read(READ_BYTES)
        except FileNotFoundError:
            return False, []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return again, whole.splitlines()
