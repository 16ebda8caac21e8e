"""``metrics.jsonl``: one JSON object per training step, readable while the run is in progress.

Every line is written at once and ends with a newline, so a reader sees whole lines only. A process that dies while it
writes, or a machine that loses its power, can leave a torn end; opening the file again cuts it off. A line that does
not fit on the disk is removed again. JSON has no NaN and no infinity: they become null. A run that is resumed removes
the lines of steps that it makes again; files of earlier releases may repeat steps, and ``read_metrics`` keeps the last
line of each::

    with MetricsLog(run / "metrics.jsonl") as log:
        log.write({"step": 1, "reward": 0.31, "loss": float("nan")})
    rows = read_metrics(run / "metrics.jsonl")      # [{"step": 1, "reward": 0.31, "loss": None}]
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from staleflow.errors import StaleFlowError

BLOCK = 1 << 16


class MetricsError(StaleFlowError, ValueError):
    """A line of the file is not a row."""


class MetricsLog:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self.repaired = _cut_torn_end(descriptor)
        """Bytes of a torn end that were cut off."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one line. It is in the file when this returns, and on the disk when the system gets to it."""
        line = memoryview(_encode(row) + b"\n")
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            os.ftruncate(self._file.fileno(), before)
            raise

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Remove the lines of this step and of later ones from the end: they are made again. Returns them."""
        descriptor = self._file.fileno()
        end, removed = os.fstat(descriptor).st_size, list[dict[str, Any]]()
        while end > 0:
            row = _row(os.pread(descriptor, end - (begin := _after_newline(descriptor, end - 1)), begin))
            if row is not None and not (isinstance(row.get("step"), int) and row["step"] >= step):
                break
            removed += [row] if row is not None else []
            end = begin
        os.ftruncate(descriptor, end)
        return removed[::-1]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines, in the order of the file; of lines with the same ``step`` the last one. No file, no rows."""
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        if not line.strip():
            continue
        if (row := _row(line)) is None:
            raise MetricsError(f"{path}, line {number}: not a JSON object: delete the line")
        rows.append(row)
    last = {row["step"]: at for at, row in enumerate(rows) if isinstance(row.get("step"), int)}
    return [row for at, row in enumerate(rows) if not isinstance(row.get("step"), int) or last[row["step"]] == at]


def _row(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if it is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _cut_torn_end(descriptor: int) -> int:
    """Cut the file until it ends with a row. Returns the bytes that were cut off."""
    size = os.fstat(descriptor).st_size
    end = _after_newline(descriptor, size)
    while end > 0 and _row(os.pread(descriptor, end - (begin := _after_newline(descriptor, end - 1)), begin)) is None:
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)
    return size - end


def _after_newline(descriptor: int, end: int) -> int:
    """The place behind the last newline before ``end``, or the beginning."""
    while end > 0:
        begin = max(0, end - BLOCK)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def _plain(value: Any) -> Any:
    """Numbers of NumPy and PyTorch as Python's, and mappings as dictionaries."""
    if isinstance(value, Mapping):
        return dict[Any, Any](value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
