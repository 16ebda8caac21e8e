import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.observe import metrics
from staleflow.observe.metrics import MetricsLog, read_metrics


def test_rows_come_back_and_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1, "reward": 0.31, "loss": math.nan, "ages": {0: 5, 1: math.inf}})
        log.write({"step": 2, "list": [1.5, -math.inf], "reward": np.float32(0.5), "count": np.int64(3)})
    assert read_metrics(path) == [
        {"step": 1, "reward": 0.31, "loss": None, "ages": {"0": 5, "1": None}},
        {"step": 2, "list": [1.5, None], "reward": 0.5, "count": 3},
    ]


def test_a_reader_sees_a_line_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1})
        assert read_metrics(path) == [{"step": 1}]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_a_write_cut_off_anywhere_loses_only_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(metrics, "BLOCK", block)
    path = tmp_path / "metrics.jsonl"
    rows: list[dict[str, object]] = [{"step": 1, "reward": 0.25}, {"step": 2, "note": "größe"}]
    with MetricsLog(path) as log:
        log.write(rows[0])
        whole = path.stat().st_size
        log.write(rows[1])
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        kept = rows[: (cut >= whole) + (cut == len(data))]
        assert read_metrics(path) == kept
        with MetricsLog(path) as log:
            assert log.repaired == cut - (0 if cut < whole else whole if cut < len(data) else cut)
            log.write({"step": 3})
        assert read_metrics(path) == [*kept, {"step": 3}]


def test_a_step_that_was_done_again_after_a_crash_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps in ((1, 2, 3), (3, 4)):
        with MetricsLog(path) as log:
            for step in steps:
                log.write({"step": step, "attempt": steps[0]})
    assert [(row["step"], row["attempt"]) for row in read_metrics(path)] == [(1, 1), (2, 1), (3, 3), (4, 3)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\noops\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object: delete the line"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: not a JSON object"):
        read_metrics(path)


@pytest.mark.parametrize(
    "end", [b'{"step": 2, "rew', b"\0" * 5000, b"\0" * 9 + b"\n", b"oops\n[1]\n\n", b"[" * 100_000 + b"\n"]
)
def test_a_torn_end_of_any_kind_is_cut_off_and_the_file_continued(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + end)
    with MetricsLog(path) as log:
        assert log.repaired == len(end)
        log.write({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_line_that_does_not_fit_on_the_disk_is_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1})
        file = log._file

        class FullDisk:
            fileno = staticmethod(file.fileno)
            room = 5

            def write(self, line: memoryview) -> int:
                if not self.room:
                    raise OSError(28, "No space left on device")
                file.write(line[:5])
                self.room = 0
                return 5

        with monkeypatch.context() as full:
            full.setattr(log, "_file", FullDisk())
            with pytest.raises(OSError, match="No space left"):
                log.write({"step": 2})
        log.write({"step": 3})
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values))
def test_any_row_is_one_line_of_strict_json(tmp_path_factory: pytest.TempPathFactory, row: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.unlink(missing_ok=True)
    with MetricsLog(path) as log:
        log.write(row)
    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
