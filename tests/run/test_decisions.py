"""The log of decisions: what was decided can be read again, the disk is not filled, and a full one harms nobody."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.decide import Decision
from staleflow.coordinator.situation import Abort, Command, Interrupt, Pull, Route, Truncate
from staleflow.run.decisions import DecisionLog, older, read_decisions

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


def test_a_disk_that_cannot_be_written_ends_the_log_with_one_line_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    log = DecisionLog(tmp_path / "gone" / "decisions.jsonl", said.append)
    for time in range(3):
        log.write(2.0 * time, Decision([Pull("i0", time)], {}))
    log.flush()
    assert len(said) == 1
    assert "decisions.jsonl cannot be written" in said[0]


def test_a_run_without_a_log_has_no_decisions(tmp_path: Path) -> None:
    assert list(read_decisions(tmp_path / "decisions.jsonl")) == []
