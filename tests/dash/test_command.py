"""``staleflow dash`` refuses what cannot be, and the page of a run ends with it."""

from __future__ import annotations

import io
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from staleflow.cli import main
from staleflow.commands.dash import beside
from tests.dash.recorded import recorded


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "is not a run directory"),
        (["--port", "70000"], "--port 70000 is impossible: give one from 0 to 65535"),
        (["--token", "a b"], "letters and digits"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dash", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_run_of_another_policy_is_not_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its ledger is not the one that the page replays."""
    assert main(["simulate", "--policy", "synchronous", "--record", str(tmp_path / "run")]) == 2
    assert "--record is for" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_the_page_of_a_run_begins_and_ends_with_it(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    out = io.StringIO()
    with beside(directory, 0, out):
        until = time.monotonic() + 60
        while "http" not in out.getvalue():
            assert time.monotonic() < until, "the page did not say where it is within 60 s"
            time.sleep(0.05)
        url = out.getvalue().removeprefix("page: ").strip()
        with urllib.request.urlopen(f"{url}api/runs", timeout=20) as answer:
            assert json.loads(answer.read())[0]["name"] == "run"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)


def test_a_run_without_a_page_starts_none(tmp_path: Path) -> None:
    directory, _ = recorded(tmp_path / "run")
    with beside(directory, None, out := io.StringIO()):
        pass
    assert out.getvalue() == ""
