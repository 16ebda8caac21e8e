"""The benches of the trainer run: a tiny model, on whatever device there is."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def run(monkeypatch: pytest.MonkeyPatch, script: str, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--smoke", *args])
    runpy.run_path(str(BENCH / script), run_name="__main__")


def test_whole_steps_and_passes_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "trainer_cuda.py", "--json", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert [each["rows"] for each in found["steps"]] == ["equal", "skewed"]
    assert all(each["tokens_per_s"] > 0 for each in found["steps"])
    assert found["passes"][0]["pass_ms"] > 0


def test_rows_with_and_without_shared_prompts_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "shared_prompts.py", "--json", str(tmp_path / "out.json"))
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["computed"] < 0.5
    assert row["gain"] > 0


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_are_measured() -> None:
    said = subprocess.run([sys.executable, BENCH / "sharded.py", "--quick", "--json"], capture_output=True, check=True)
    assert [row["ranks"] for row in json.loads(said.stdout)["rows"]] == [1, 2, 3]


def test_a_step_has_a_timeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "gpu/step.py", "--json", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.svg"))
    spans = json.loads((tmp_path / "out.json").read_text())["ms"]
    order = [spans[name] for name in ("gradients", "note", "update", "push", "pull", "first tokens")]
    assert order == sorted(order)
    assert spans["push"][1] <= spans["standby"][0], "engines do not wait for what another trainer would need"
    assert (tmp_path / "out.svg").read_text().count("<rect") == len(spans)
