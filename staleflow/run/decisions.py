"""``decisions.jsonl``: what the coordinator decided and on what, for those who ask why.

    log = DecisionLog(run / "decisions.jsonl", on_trouble=print)
    log.write(seconds, decision)
    for row in read_decisions(run / "decisions.jsonl"):      # oldest first, also while the run is alive
        row.time, row.inputs["queued"], row.commands         # [["Pull", "i0", 3], ["Route", "p7/0", "p7", "i1", 3]]

Decisions that commanded nothing are left out. The log is bounded (``bounded_log.py``). Lines reach the file every few
seconds, many at once because that is cheaper; so a run that is killed lacks its last ones. On a full disk the latest
``MOST_WAITING`` wait in memory until there is room.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from staleflow.coordinator.decide import Decision, plain
from staleflow.run.bounded_log import MOST_BYTES, BoundedLog, read_lines

MOST_WAITING = 4096
FLUSH_S = 3.0


class Decided(msgspec.Struct):
    """One line."""

    time: float
    """Seconds of training before it, as in ``metrics.jsonl``."""
    inputs: dict[str, Any]
    commands: list[list[Any]]
    """The kind of each and its fields, in the order in which they were carried out."""


class DecisionLog:
    def __init__(self, path: Path, on_trouble: Callable[[str], None], most_bytes: int = MOST_BYTES) -> None:
        self._log = BoundedLog(path, on_trouble, "only the latest decisions are kept", most_bytes)
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
        lines = msgspec.json.Encoder().encode_lines(
            {"time": time, "inputs": decision.inputs, "commands": plain(decision.commands)}
            for time, decision in self._waiting
        )
        if self._log.write(lines):
            self._waiting = []
        else:
            del self._waiting[:-MOST_WAITING]


def read_decisions(path: Path) -> Iterator[Decided]:
    return read_lines(path, Decided)
