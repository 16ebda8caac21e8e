"""``decisions.jsonl``: what the coordinator decided and on what, for those who ask why.

    log = DecisionLog(run / "decisions.jsonl", on_trouble=print)
    log.write(seconds, decision)
    for row in read_decisions(run / "decisions.jsonl"):      # oldest first, also while the run is alive
        row.time, row.inputs["queued"], row.commands         # [["Pull", "i0", 3], ["Route", "p7/0", "p7", "i1", 3]]

Decisions that commanded nothing are left out. The log is bounded: a file that has reached ``MOST_BYTES`` becomes
``decisions.1.jsonl`` and replaces the one before it. Lines reach the file every few seconds, many at once because that
is cheaper; so a run that is killed lacks its last ones. On a full disk (``on_trouble`` is called once) the latest
``MOST_WAITING`` wait in memory until there is room.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from staleflow.coordinator.decide import Decision, plain

MOST_BYTES = 32 * 2**20
"""Of one of the two files."""
MOST_WAITING = 4096
FLUSH_S = 3.0
T = TypeVar("T")


class Decided(msgspec.Struct):
    """One line."""

    time: float
    """Seconds of training before it, as in ``metrics.jsonl``."""
    inputs: dict[str, Any]
    commands: list[list[Any]]
    """The kind of each and its fields, in the order in which they were carried out."""


class DecisionLog:
    def __init__(self, path: Path, on_trouble: Callable[[str], None], most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._on_trouble = on_trouble
        self._trouble = False
        self._most = most_bytes
        self._size = path.stat().st_size if path.exists() else 0
        self._begin = b"\n" if self._size else b""
        """The last line of an earlier attempt may be torn."""
        self._waiting: list[tuple[float, Decision]] = []
        self._flushed_at = 0.0

    def write(self, time: float, decision: Decision) -> None:
        if not decision.commands:
            return
        self._waiting.append((time, decision))
        if time - self._flushed_at >= FLUSH_S:
            self._flushed_at = time
            self.flush()

    def flush(self) -> None:
        """Put what was written into the file."""
        if not self._waiting:
            return
        text = self._begin + msgspec.json.Encoder().encode_lines(
            {"time": time, "inputs": decision.inputs, "commands": plain(decision.commands)}
            for time, decision in self._waiting
        )
        try:
            if self._size + len(text) > self._most and self._size:
                self.path.replace(older(self.path))
                self._size = 0
            with self.path.open("ab") as file:
                file.write(text)
        except OSError as error:
            del self._waiting[:-MOST_WAITING]
            with suppress(OSError):  # what did fit is written again, with the rest
                os.truncate(self.path, self._size)
            if not self._trouble:
                self._on_trouble(
                    f"{self.path} cannot be written ({error.strerror}): only the latest decisions are kept"
                )
            self._trouble = True
            return
        self._waiting, self._begin, self._trouble = [], b"", False
        self._size += len(text)


def older(path: Path) -> Path:
    """Where the lines before those of ``path`` are."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read_decisions(path: Path) -> Iterator[Decided]:
    return read_lines(path, Decided)


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
