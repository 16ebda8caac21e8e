"""A line of ``metrics.jsonl`` for every training step, and nothing lost where the disk is full.

log = StepLog(directory.metrics)
log.add(report, groups, seconds, instances_busy_s)      # before a step is committed: every one that is has its line
log.write()                                             # also from time to time: what could not be written yet
log.trouble                                             # why something cannot be written at the moment, if so
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staleflow.observe.metrics import MetricsLog
from staleflow.servers.lifecycle import TRAINED, Group
from staleflow.types import Trained


class StepLog:
    def __init__(self, path: Path) -> None:
        self.trouble = ""
        self.busy_s = 0.0
        """What instances had been busy for, in all, when the last step was committed."""
        self._metrics = MetricsLog(path)
        self._rows: list[dict[str, Any]] = []
        """Lines that could not be written yet."""

    def add(
        self, report: Trained, groups: list[Group], seconds: float, busy_s: float, more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What the trainer reported of a step, the groups it was made of, and ``more`` about their responses. Returns
        its line."""
        members = [member for group in groups for member in group.members if member.state in TRAINED]
        row = {
            "step": report.step,
            "time": seconds,
            **report.facts,
            "token_staleness": report.token_staleness,
            "trajectory_staleness": report.trajectory_staleness,
            "train_s": report.busy_s,
            "idle_s": report.idle_s,
            "instances_busy_s": busy_s - self.busy_s,
            "prompt_tokens": sum(member.group.prompt_tokens for member in members),
            "prompts": [group.prompt for group in groups],
            "signal": [differ(group) for group in groups],
            "lengths": [member.generated for member in members],
            **(more or {}),
        }
        self._rows.append(row)
        self.busy_s = busy_s
        self.write()
        return row

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Remove the lines of this step and of later ones. Returns that of the step, if it was written."""
        return next((row for row in self._metrics.rewind(step) if row["step"] == step), None)

    def write(self) -> None:
        try:
            while self._rows:
                self._metrics.write(self._rows[0])
                del self._rows[0]
        except OSError as error:
            self.trouble = f"cannot write {self._metrics.path} ({error.strerror}): make room"
        else:
            self.trouble = ""

    def close(self) -> None:
        self.write()
        self._metrics.close()


def differ(group: Group) -> bool:
    """Whether its rewards do: otherwise it teaches nothing."""
    return len({member.reward for member in group.members if member.state in TRAINED}) > 1
