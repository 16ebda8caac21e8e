"""Files of a run grow, are cut by a resume and replaced when they are full: the page follows all of it."""

from __future__ import annotations

import json
from pathlib import Path

from staleflow.dash.fleet import MOST_CELLS, FleetHistory
from staleflow.dash.lines import Lines
from staleflow.dash.steps import Steps
from staleflow.dash.texts import Texts
from staleflow.run.bounded_log import BoundedLog
from staleflow.run.directory import RunDirectory
from staleflow.run.fleet import FleetLog, InstanceMoment, Moment
from tests.dash.recorded import sample, write_samples


def test_a_torn_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntw")
    lines = Lines(path)
    assert lines.read() == (False, [b"one"])
    assert lines.read() == (False, [])
    with path.open("ab") as file:
        file.write(b"o\n")
    assert lines.read() == (False, [b"two"])


def test_a_file_that_was_full_continues_in_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log, seen = BoundedLog(path, print, "", most_bytes=64), list[bytes]()
    lines = Lines(path)
    for number in range(40):
        log.write(b"%d\n" % number)
        seen += lines.read()[1]
    assert seen == [b"%d" % number for number in range(40)]
    late = Lines(path)
    assert (late.read()[1] + late.read()[1])[-1] == b"39"


def test_steps_that_are_made_again_replace_the_ones_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = lambda step, reward: json.dumps({"step": step, "reward": reward, "token_staleness": {"0": 5}}) + "\n"  # noqa: E731
    path.write_text("".join(row(step, 0.0) for step in range(6)))
    steps = Steps(path)
    steps.read_on()
    with path.open("a") as file:
        file.write(row(3, 1.0))
    steps.read_on()
    assert steps.series(100)["step"] == [0, 1, 2, 3]
    assert steps.series(100)["reward"] == [0, 0, 0, 1]
    assert steps.tokens == 20
    path.write_text(row(0, 2.0))  # a resume from the beginning
    steps.read_on()
    assert steps.series(100)["reward"] == [2]


def test_a_long_run_has_no_more_points_than_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": s, "reward": s, "token_staleness": {"1": 2}}) + "\n" for s in range(1000))
    )
    steps = Steps(path)
    steps.read_on()
    series = steps.series(64)
    assert len(series["step"]) <= 64
    assert series["reward"][0] < series["reward"][-1]  # type: ignore[operator]
    ages = steps.ages(64)
    assert sum(map(sum, ages.tokens)) == 2000


def test_samples_are_found_by_what_they_say_and_not_by_how_they_are_stored(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_samples(
        directory, [sample(step, f"p{step}/0", f'Say "{step}"\nplease', f"Äpfel {step}") for step in range(50)]
    )
    texts = Texts(directory.samples)
    texts.read_on()
    assert [each.step for each in texts.search('"7"')[0]] == [7]
    assert [each.step for each in texts.search("Äpfel 12")[0]] == [12]
    assert texts.search("response") == ([], 0)  # the name of a field
    assert [each.name for each in texts.search(name="p4/0")[0]] == ["p4/0"]
    first, before = texts.search("please", limit=20)
    second, _ = texts.search("please", limit=40, before=before)
    assert [each.step for each in (*first, *second)] == list(range(49, -1, -1))


def test_the_load_of_a_thousand_instances_stays_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "fleet.jsonl"
    log, history = FleetLog(path, print), FleetHistory(path)
    names = [f"i{number}" for number in range(1000)]
    for second in range(40):
        if log.due(float(second), len(names)):
            log.write(
                Moment(
                    float(second), instances=tuple(InstanceMoment(n, 1, second, 0, 1, 2, 10 * second) for n in names)
                )
            )
    history.read_on()
    assert len(history.times) == 2  # of so many instances, each 20 seconds
    assert history.tokens_per_s("i7") == 10.0
    rows = history.columns(0.0, 40.0, 40, ["i3", "none"])
    assert rows[0][0] == (0, 1, "")
    assert set(rows[1]) == {None}
    assert len(history.times) * len(names) <= MOST_CELLS
