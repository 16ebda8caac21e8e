"""No line of the metrics is lost where the disk is full for a while."""

import errno
from pathlib import Path
from typing import Any

import pytest

from staleflow.observe.metrics import MetricsLog, read_metrics
from staleflow.run.step_log import StepLog
from staleflow.types import Trained


def report(step: int) -> Trained:
    return Trained(step, {"reward": 0.5}, {0: 8}, {0: 1}, 1.0, 0.5)


def test_lines_of_a_full_disk_are_written_in_order_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.add(report(0), [], 1.0, busy_s=3.0)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(MetricsLog, "write", full)
        log.add(report(1), [], 2.0, busy_s=7.0)
        log.add(report(2), [], 3.0, busy_s=8.0)
        assert "No space left" in log.trouble
    log.write()
    assert log.trouble == ""
    log.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["instances_busy_s"] for row in rows] == [3.0, 4.0, 1.0]
