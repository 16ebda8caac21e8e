"""The log of decisions: what was decided can be read again, the disk is not filled, and a full one harms nobody."""

import resource
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.decide import Decision
from staleflow.coordinator.situation import Abort, Command, Interrupt, Pull, Route, Truncate
from staleflow.run.bounded_log import older
from staleflow.run.decisions import DecisionLog, read_decisions

NAMES = st.text(max_size=5)
COMMANDS = st.one_of(
    st.builds(Route, NAMES, NAMES, NAMES, st.integers(0, 9)),
    st.builds(Interrupt, NAMES, NAMES, NAMES),
    st.builds(Pull, NAMES, st.integers(0, 9)),
    st.builds(Abort, NAMES, NAMES),
    st.builds(Truncate, NAMES, NAMES),
)


def refuse(why: str) -> None:
    raise AssertionError(why)


def fields(command: Command) -> list[object]:
    values = command if isinstance(command, tuple) else [getattr(command, name) for name in command.__slots__]
    return [type(command).__name__, *values]


@given(st.lists(st.tuples(st.floats(0, 100), st.lists(COMMANDS, max_size=3)), max_size=8))
def test_what_was_commanded_is_read_back_with_its_inputs(tmp_path_factory, rows) -> None:
    path: Path = tmp_path_factory.mktemp("run") / "decisions.jsonl"
    log = DecisionLog(path, refuse)
    for time, commands in rows:
        log.write(time, Decision(commands, {"now": time, "room": {"0": 3}}))
    log.flush()
    found = [(row.time, row.inputs, row.commands) for row in read_decisions(path)]
    assert found == [
        (time, {"now": time, "room": {"0": 3}}, [fields(each) for each in commands])
        for time, commands in rows
        if commands
    ]


def test_a_long_run_keeps_its_latest_decisions_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    for life in range(2):
        log = DecisionLog(path, refuse, most_bytes=2_000)
        for step in range(500):
            log.write(500.0 * life + step, Decision([Pull("i0", step)], {}))
        log.flush()
    kept = [row.time for row in read_decisions(path)]
    assert kept == [float(time) for time in range(1000 - len(kept), 1000)]
    assert 2_000 < path.stat().st_size + older(path).stat().st_size <= 4_000


def test_a_line_that_a_killed_run_left_torn_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    for time in range(2):
        log = DecisionLog(path, refuse)
        log.write(float(time), Decision([Pull("i0", time)], {}))
        log.flush()
        with path.open("ab") as file:
            file.write(b'{"time": 7.0, "inp')
    assert [row.time for row in read_decisions(path)] == [0.0, 1.0]


def test_decisions_wait_while_the_disk_is_full_and_are_neither_lost_torn_nor_written_twice(tmp_path: Path) -> None:
    """After the first line that could not be written, no decision was recorded any more."""
    path, said = tmp_path / "decisions.jsonl", list[str]()
    log = DecisionLog(path, said.append)
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, most))  # as a full disk: a part is written, the rest is refused
    try:
        for time in range(20):
            log.write(2.0 * time, Decision([Pull("i0", time)], {}))
        full = [row.time for row in read_decisions(path)]
        assert len(full) < 20
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    log.flush()
    assert [row.time for row in read_decisions(path)] == [2.0 * time for time in range(20)]
    assert len(said) == 1
    assert "decisions.jsonl cannot be written (File too large)" in said[0]


def test_a_run_without_a_log_has_no_decisions(tmp_path: Path) -> None:
    assert list(read_decisions(tmp_path / "decisions.jsonl")) == []
