"""A report is one file that needs nothing else, whatever state the run is in; a trace is what Perfetto reads."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from staleflow.cli import main
from staleflow.config import load
from staleflow.config.presets import PAPER
from staleflow.run.directory import RunDirectory
from staleflow.run.environment import write_environment
from staleflow.run.events import read_events
from staleflow.study.perfetto import write_trace
from staleflow.study.report import page
from staleflow.study.report.waste import wasted_tokens
from staleflow.study.why.lives import Lives
from tests.refusals import refused_command
from tests.study.test_why import recorded


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, "it loads something"
        assert tag not in ("script", "link", "iframe", "img")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def checked(text: str) -> list[str]:
    """The headings of a page that is whole."""
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert "url(" not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    return tags.headings


@pytest.mark.parametrize("command", ["report", "trace"])
@pytest.mark.parametrize("out", ["missing/page", "."])
def test_a_place_that_cannot_be_written_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, out: str
) -> None:
    directory, _ = recorded(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    said = refused_command(capsys, command, str(directory.path), "--out", out)
    assert f"--out {out} cannot be written: give a file in a folder that exists and is yours" in said


def test_the_report_of_a_finished_run_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, config = recorded(tmp_path / "a <run>", filter="no-signal")
    write_environment(directory, ["staleflow", "simulate", "paper-14b", "--record", "x y"])
    assert main(["report", str(directory.path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(directory.report)
    text = directory.report.read_text()
    assert checked(text) == [
        "Result", "What sets the pace", "Learning", "Staleness", "What was not trained on", "Time",
        "How to make it again", "Configuration",
    ]  # fmt: skip
    assert "staleflow simulate paper-14b --record &#x27;x y&#x27;" in text
    assert "numpy==" in text
    assert f"seed: {config.seed}" in text
    assert "&lt;run&gt;" in text
    assert not list(directory.path.glob(".report.html.*")), "no draft is left behind"


def test_a_report_says_of_which_version_the_last_evaluation_is(tmp_path: Path) -> None:
    """A run that was stopped before its second evaluation had, it seemed, learnt nothing."""
    directory, config = recorded(tmp_path / "run")
    summary = json.loads(directory.summary.read_text())

    def told(*measured: tuple[int, float]) -> str:
        found = [{"step": version, "accuracy": value} for version, value in measured]
        directory.summary.write_text(json.dumps(summary | {"accuracy": found, "binary": True}))
        said = re.search(r"<td>held-out</td><td>(.*?)</td>", page(directory, config))
        return said[1] if said else ""

    last = summary["steps"]
    assert told() == ""
    assert told((0, 0.342)) == "34.2 % (version 0)"
    assert told((0, 0.342), (last, 0.9)) == "34.2 % -&gt; 90.0 %"
    assert told((0, 0.342), (1, 0.9)) == "34.2 % -&gt; 90.0 % (version 1)"


def test_a_run_that_has_only_begun_has_a_report_too(tmp_path: Path) -> None:
    config = load(PAPER, [])
    directory = RunDirectory.at(tmp_path / "run", config)
    assert checked(page(directory, config)) == [
        "Result", "What was not trained on", "How to make it again", "Configuration",
    ]  # fmt: skip


def test_a_run_that_died_is_reported_with_what_it_left(tmp_path: Path) -> None:
    directory, config = recorded(tmp_path / "run")
    directory.summary.unlink()
    with directory.metrics.open("ab") as file:
        file.write(b'{"step": 8, "rew')
    with directory.fleet.open("ab") as file:
        file.write(b'{"time": 1')
    assert "Learning" in checked(page(directory, config))


def test_waste_by_cause_is_what_the_simulator_counted(tmp_path: Path) -> None:
    changes = {"filter": "no-signal", "extra_members": 1, "redundancy": 2, "cluster.reward_success": 0.8}
    directory, _ = recorded(tmp_path / "run", **changes)
    counted = json.loads(directory.summary.read_text())["wasted"]
    found = wasted_tokens(directory)
    assert found["no signal"] == counted["no signal"]
    assert found.keys() <= counted.keys()
    for cause, tokens in found.items():
        assert tokens <= counted[cause], "an engine may have made more than it had streamed"


NEEDED = {
    "X": {"name": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "ts": int, "pid": int, "tid": int, "s": str},
    "C": {"name": str, "ts": int, "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
}
"""Of Chrome's trace events, by phase: complete, instant, counter, metadata."""


@pytest.mark.parametrize("changes", [{}, {"cluster.reward_s": 0}, {"cluster.lengths": "constant", "staleness": 0}])
def test_a_trace_is_what_perfetto_reads(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Perfetto drops slices of one track that overlap without one being inside the other; here none do at all."""
    directory, _ = recorded(tmp_path / "run", **changes)
    write_trace(directory, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    for each in events:
        assert all(type(each[name]) is kind for name, kind in NEEDED[each["ph"]].items()), each
        assert each.get("ts", 0) >= 0
        assert each.get("dur", 1) >= 1
        assert each.get("s", "p") in ("g", "p", "t")
        assert each["ph"] != "C" or all(isinstance(value, int | float) for value in each["args"].values())
    named = {(each["pid"], each.get("tid")) for each in events if each["ph"] == "M" and "name" in each["args"]}
    ends: dict[tuple[int, int], int] = {}
    for each in sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"]):
        track = each["pid"], each["tid"]
        assert each["ts"] >= ends.get(track, 0), "two slices of one track overlap"
        assert {(each["pid"], None), track} <= named, "a track without a name"
        ends[track] = each["ts"] + each["dur"]


def test_a_trace_has_every_response_in_a_lane_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = recorded(tmp_path / "run")
    assert main(["trace", str(directory.path), "--json"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["trace"])
    events = json.loads(path.read_text())["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    spells = [
        spell
        for life in Lives(read_events(directory)).trajectories.values()
        for spell in life.spells(1e9)
        if spell.doing == "decoding"
    ]
    assert sum(each["pid"] >= 10 for each in slices) == len(spells)
    steps = [each["name"] for each in slices if (each["pid"], each["tid"]) == (1, 1)]
    assert steps == [f"step {at}" for at in range(8)]
    assert any(each["name"].startswith("has pulled version") for each in events if each["ph"] == "i")
    assert main(["trace", str(directory.path), "--steps", "2-3", "--out", str(tmp_path / "part.json")]) == 0
    part = json.loads((tmp_path / "part.json").read_text())["traceEvents"]
    steps = [each["name"] for each in part if each["ph"] == "X" and each["name"].startswith("step ")]
    assert steps == ["step 2", "step 3"]
    begin, end = (next(each for each in slices if each["name"] == name) for name in ("step 2", "step 3"))
    during = [each for each in slices if each["ts"] + each["dur"] > begin["ts"] and each["ts"] < end["ts"] + end["dur"]]
    names = {each["name"] for each in during if each["pid"] >= 10}
    assert {each["name"] for each in part if each["ph"] == "X" and each["pid"] >= 10} >= names
    assert len(part) < len(events)
    assert main(["trace", str(directory.path), "--steps", "3-2"]) == 2
