"""The record of a run, told in the journal as it grows, so that it can be told again after a crash.

kept = JournalledRecord(Record(bound), server.note)
kept.trained(report, seconds, spent)        # what the trainer says of a step
kept.committed(step, seconds)               # the step is: its report goes into the record

recover(server, journal, kept.restore, kept.hear)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from staleflow.run.incidents import count
from staleflow.run.record import Record
from staleflow.servers.journal import Event
from staleflow.servers.lifecycle import Trajectory
from staleflow.types import Trained


class JournalledRecord:
    def __init__(self, record: Record, note: Callable[..., None]) -> None:
        """``note`` writes an event to the journal."""
        self.record = record
        self.report: Trained | None = None
        """The latest."""
        self.reported_at = 0.0
        """When it came."""
        self._note = note

    def trained(self, report: Trained, seconds: float, spent: dict[str, float]) -> None:
        """``spent``: fields of the record that grow with time, as they are now."""
        self.report, self.reported_at = report, seconds
        facts = (report.step, report.facts, report.token_staleness, report.trajectory_staleness)
        self._note("trained", *facts, report.busy_s, report.idle_s, seconds, spent)

    def recall(self, row: dict[str, Any]) -> None:
        """The report of a step that the journal lost, from its line of ``metrics.jsonl``."""
        if (self.report is None or self.report.step != row["step"]) and "reward" in row:
            self.trained(report_of(row), row["time"], {})

    def report_of(self, step: int) -> Trained | None:
        return self.report if self.report is not None and self.report.step == step else None

    def committed(self, step: int, seconds: float) -> Trained | None:
        """Returns the report of the step, if the trainer has sent one."""
        report = self.report_of(step)
        self.record.committed(step + 1, seconds if report is None else self.reported_at)
        if report is not None:
            ages = report.token_staleness, report.trajectory_staleness
            self.record.trained(report.facts, *ages, report.busy_s, report.idle_s)
        return report

    def evaluated(self, version: int, accuracy: float, figures: dict[str, float], binary: bool) -> None:
        self._note("evaluated", version, accuracy, figures, binary)
        self.record.evaluated(version, accuracy, figures, binary)

    def counted(self, table: Literal["restarts", "failures"], what: str, why: str) -> None:
        self._note("counted", table, what, why)
        count(getattr(self.record, table), what, why)

    def tell(self) -> None:
        """All of it: what is known only in the end has been added."""
        self._note("record", self.record.to_bytes())

    def aborted(self, trajectory: Trajectory, _reason: str) -> None:
        self.record.tokens_wasted += trajectory.generated

    # After a crash

    def restore(self, body: bytes) -> None:
        """From a snapshot."""
        if body:
            self.record = Record.from_bytes(body)

    def hear(self, event: Event) -> None:
        """What was told before is told again, to this record alone."""
        match event:
            case ("trained", step, facts, tokens, trajectories, busy_s, idle_s, seconds, spent):
                self.report, self.reported_at = Trained(step, facts, tokens, trajectories, busy_s, idle_s), seconds
                self.record = replace(self.record, **spent)
            case ("commit", step):
                self.committed(step, self.record.seconds)
            case ("evaluated", version, accuracy, figures, binary):
                self.record.evaluated(version, accuracy, figures, binary)
            case ("counted", table, what, why):
                count(getattr(self.record, table), what, why)
            case ("record", body):
                self.restore(body)
            case _:
                pass


def report_of(row: dict[str, Any]) -> Trained:
    """The report that a line of ``metrics.jsonl`` was made of."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    facts: dict[str, float] = {name: value for name, value in numbers.items() if name not in _NOT_FACTS}
    return Trained(row["step"], facts, _ages(row, "token"), _ages(row, "trajectory"), row["train_s"], row["idle_s"])


def _ages(row: dict[str, Any], of: str) -> dict[int, int]:
    return {int(age): number for age, number in row[f"{of}_staleness"].items()}


_NOT_FACTS = {"step", "time", "train_s", "idle_s", "instances_busy_s", "prompt_tokens"}
