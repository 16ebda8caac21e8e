"""Files of results: nothing is measured for a file that cannot be written or continued, and none is half-written."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench import agents_turns, kept  # noqa: E402
from bench.gpu import lab, presets, stages, system, tail  # noqa: E402


@pytest.mark.parametrize("main", [agents_turns.main, presets.main, stages.main, system.main, tail.main])
def test_hours_are_not_measured_for_a_folder_that_is_missing(
    main: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = "--json" if main in (agents_turns.main, presets.main) else "--output"
    with pytest.raises(SystemExit) as ended:
        main([option, str(tmp_path / "missing" / "out.json")])  # type: ignore[operator]
    assert ended.value.code == 2
    assert "missing is not a folder: make it first" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00", '"text"'])
def test_a_file_without_results_is_not_a_traceback(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    path.write_text(content)
    with pytest.raises(SystemExit):
        tail.main(["--output", str(path)])
    said = capsys.readouterr().err
    assert f"{path} has no results of this script" in said
    assert "remove it, or name another" in said
    assert path.read_text() == content


def test_what_fails_while_it_is_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    kept.write(path, {"a": 1})
    with pytest.raises(TypeError):
        kept.write(path, {"a": 1, "b": object()})
    assert kept.read(path) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_folder_is_not_a_file_of_results_and_a_list_is_for_those_who_keep_one(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder: name a file in it"):
        kept.to_write(str(tmp_path))
    path = tmp_path / "out.json"
    kept.write(path, [1])
    assert kept.to_continue_list(str(path)) == path
    with pytest.raises(argparse.ArgumentTypeError, match="JSON of another kind"):
        kept.to_continue(str(path))


def test_a_relative_folder_of_runs_is_not_looked_for_in_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs in the checkout: it left its runs there, and the bench found none."""

    def ran(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        (word,) = (each for each in command if each.startswith("runs="))
        latest = cwd / word.removeprefix("runs=") / "latest"
        latest.mkdir(parents=True)
        (latest / "summary.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab.subprocess, "run", ran)
    assert (lab.train(Path("runs"), "one", "laptop", []) / "summary.json").is_file()
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["one"]


def test_a_file_that_another_bench_should_have_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        presets.main(["--smoke", "--cells", "nowhere.json"])
    assert "argument --cells: nowhere.json: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words", "why"),
    [
        ("agents.py", ["--bounds", "x"], "'x': give a whole number that is 0 or more, with commas between several"),
        ("agents.py", ["--bounds", "2,-1"], "'-1': give a whole number that is 0 or more"),
        ("agents.py", ["--seeds", "0"], "'0': give a whole number that is 1 or more"),
        ("agents_policies.py", ["--tool-s", "nan"], "'nan': give a number that is 0 or more"),
    ],
)
def test_a_number_that_makes_no_sense_is_one_line_and_not_a_traceback(script: str, words: list[str], why: str) -> None:
    command = [sys.executable, str(ROOT / "bench" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_results_that_cannot_be_written_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kept.write(Path("/dev/full"), {})
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("/dev/full cannot be written (OSError: [Errno 28]")
