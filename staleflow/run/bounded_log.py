"""A file of JSON lines that never grows beyond a limit: full, it becomes ``NAME.1.jsonl`` and replaces the one before.

log = BoundedLog(run / "decisions.jsonl", on_trouble=print, lost="only the latest decisions are kept")
log.write(lines)                        # False: there is no room on the disk, and nothing of it was written
for row in read_lines(log.path, Row):   # oldest first, also while the run is alive
    ...
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

MOST_BYTES = 32 * 2**20
"""Of one of the two files."""
T = TypeVar("T")


class BoundedLog:
    def __init__(self, path: Path, on_trouble: Callable[[str], None], lost: str, most_bytes: int = MOST_BYTES) -> None:
        """``on_trouble`` is called once for each time that the disk is full, with what is ``lost`` by that."""
        self.path = path
        self._on_trouble = on_trouble
        self._lost = lost
        self._trouble = False
        self._most = most_bytes
        self._size = path.stat().st_size if path.exists() else 0
        self._begin = b"\n" if self._size else b""
        """The last line of an earlier attempt may be torn."""

    def write(self, lines: bytes) -> bool:
        lines = self._begin + lines
        try:
            if self._size + len(lines) > self._most and self._size:
                self.path.replace(older(self.path))
                self._size = 0
            with self.path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            with suppress(OSError):  # what did fit is written again, with the rest
                os.truncate(self.path, self._size)
            if not self._trouble:
                self._on_trouble(f"{self.path} cannot be written ({error.strerror}): {self._lost}")
            self._trouble = True
            return False
        self._size += len(lines)
        self._begin, self._trouble = b"", False
        return True


def older(path: Path) -> Path:
    """Where the lines before those of ``path`` are."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Of a log in two files: what is still there, oldest first. A line that a killed run left torn is skipped."""
    decoder = msgspec.json.Decoder(kind)
    for file in (older(path), path):
        if not file.exists():
            continue
        with file.open("rb") as lines:
            for line in lines:
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
