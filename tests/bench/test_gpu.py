"""The experiments on a GPU run, on a CPU with a tiny model, and what was measured is not measured again."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu import engines, lab, learning, presets, simulated, skewed, stages, system, tail, traced  # noqa: E402
from staleflow.coordinator.cost import CostModel  # noqa: E402
from tests.tiny_models import save_tiny  # noqa: E402


def test_few_sequences_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "tail.json"
    found = tail.main(["--smoke", "--output", str(path)])
    assert found["skewed few"]["steps"] >= found["skewed few"]["steps_with_at_most_32"] > 0
    assert {"tiny 1 x 32 plain", "tiny 2 x 32 few", "tiny 4 x 32 few"} <= set(found)
    changed = json.loads(path.read_text()) | {"skewed few": {"seconds": -1.0}}
    path.write_text(json.dumps(changed))
    assert tail.main(["--smoke", "--output", str(path)])["skewed few"] == {"seconds": -1.0}


def test_the_time_of_a_layer_is_that_of_its_stages() -> None:
    found = stages.main(["--smoke"])["smoke"]
    assert found["qkv"] == pytest.approx(1.0), "a stage that was made up takes a microsecond"
    stages_only = sum(value for name, value in found.items() if name not in ("a layer", "head, of the step"))
    assert stages_only <= found["a layer"]


@pytest.mark.parametrize(("rows", "longest"), [(1, 900), (2, 15), (64, 2000), (256, 3500)])
def test_contexts_as_in_a_run_are_short_but_for_the_longest(rows: int, longest: int) -> None:
    lengths = stages.skewed(rows, longest)
    assert len(lengths) == rows
    assert lengths.max() == lengths[0] == longest
    assert lengths.min() > 0
    assert rows < 64 or 150 < lengths.mean() < 300


def test_presets_gain_from_faster_decoding_where_few_sequences_run_and_nowhere_else(tmp_path: Path) -> None:
    (row,) = presets.main(["--smoke", "--json", str(tmp_path / "presets.json")])["rows"]
    assert row["gain"] > 0
    cost = CostModel(0.02, 0.01, 1e-4, 0.001, 1e-7, 1e-6)
    faster = presets.Faster(**asdict(cost), gains=((1, 2.0), (32, 1.5), (presets.NOTHING_FROM, 1.0)))
    assert faster.step(1, 100) == pytest.approx(cost.step(1, 100) / 2)
    assert faster.step(1, 100, 50) == pytest.approx(cost.step(1, 100) / 2 + 50e-6), "a prefill takes as long as before"
    assert faster.step(500, 10_000) == cost.step(500, 10_000)
    assert faster.step(0, 0, 50) == cost.step(0, 0, 50)
    assert faster.steps(3, 32, 100) == pytest.approx(sum(faster.step(32, 100 + 32 * at) for at in range(3)))
    times = faster.step_times(np.array([1, 32, 500]), np.array([100, 100, 10_000]))
    assert times == pytest.approx([faster.step(1, 100), faster.step(32, 100), faster.step(500, 10_000)])


@pytest.mark.processes
def test_engines_side_by_side_and_one_that_fails_to_start(tmp_path: Path) -> None:
    found = engines.sides(True, ["built-in", "nobody"], tmp_path)
    assert "failed" in found["nobody"]
    assert found["built-in"].keys() == {"start_s", "2 x 32, ms", "skewed, first time, s", "skewed, s", "pull"}


def test_a_setting_in_which_cells_differ_is_not_given_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    """It was overridden by the cell, and the name of the result said otherwise."""
    with pytest.raises(SystemExit):
        system.main(["--smoke", "--set", "staleness=3"])
    assert "--set staleness=3: that is what cells differ in" in capsys.readouterr().err


@pytest.mark.processes
def test_a_whole_run_with_imposed_lengths_its_trace_and_its_prediction(tmp_path: Path) -> None:
    changed = ["--set", "training.share_prompts=false", "--trace", str(tmp_path / "traces")]
    found = system.main(["--smoke", *changed, "--runs", str(tmp_path), "--output", str(tmp_path / "system.json")])
    assert found["smoke, training.share_prompts=false, 1 x rollout, bound 2, stream"]["tokens_per_s"] > 0
    (run,) = tmp_path.glob("smoke-training.share_prompts=false-1/*")
    assert "share_prompts: false" in (run / "config.yaml").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = [f"p{prompt}/{member}" for row in rows for prompt in row["prompts"] for member in range(2)]
    assert [n for row in rows for n in row["lengths"]] == [skewed.length(name, 8, 32) for name in names]

    (steps,) = traced.main([str(each) for each in (tmp_path / "traces").glob("*/*.jsonl")]).values()
    assert steps["pull"]["steps"] > 0
    assert steps["prefill"]["prefilled"] > 0
    assert steps["not ahead"]["made"] > 0
    assert steps["all"]["steps"] == sum(row["steps"] for kind, row in steps.items() if kind != "all")

    for name in ("0-batch", "2-stream"):
        shutil.copytree(run, tmp_path / "runs" / name)
    cells = {f"tiny {n} x {context} few": {"ms": 1 + n * context / 1e3} for n in (1, 4) for context in (8, 32)}
    (tmp_path / "tail.json").write_text(json.dumps(cells))
    given = ["--runs", str(tmp_path / "runs"), "--tail", str(tmp_path / "tail.json"), "--shape", "tiny"]
    measured = {"steps": 5, **dict.fromkeys(simulated.METRICS, 1.0)}  # of a run that has no folder here
    (tmp_path / "system.json").write_text(json.dumps({"skewed tiny, 1 x rollout, bound 1, batch": measured}))
    rows = simulated.main([*given, "--lengths", "8", "32", "8", "--measured", str(tmp_path / "system.json")])
    assert set(rows) == {"0-batch", "1-batch", "2-stream"}
    assert rows["1-batch"]["in turn"]["tokens_per_s"]["measured"] == 1.0
    turns, apart = (rows["2-stream"][way]["tokens_per_s"]["predicted"] for way in ("in turn", "as if alone"))
    assert turns > 0
    assert apart > 0  # which is larger rests on what the run took here


def test_accuracy_by_bound_and_the_picture_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def train(runs: Path, name: str, *_unused: Any) -> Path:
        made.append(name)
        folder = runs / name
        folder.mkdir(parents=True)
        facts = {"wall_s": 2.0, "violations": 0, "max_staleness": 0, "mean_staleness": 0.0}
        lists = {"staleness_histogram": {"0": 9}, "rewards": [0.5]}
        accuracy = [{"step": step, "seconds": step / 2, "accuracy": step / 4} for step in (0, 2, 4)]
        (folder / "summary.json").write_text(json.dumps({**facts, **lists, "accuracy": accuracy}))
        return folder

    monkeypatch.setattr(learning, "train", train)
    files = ["--runs", str(tmp_path), "--output", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.svg")]
    found = learning.main(["--jobs", "2", "--most", "3", *files])
    assert [row["bound"] for name, row in found.items() if name != "run"] == [0, 2, 1]
    assert (tmp_path / "out.svg").read_text().count("<polyline") == 3
    learning.main(["--most", "4", *files])
    assert len(made) == 4, "what is in the file is not run again"


@pytest.mark.processes
def test_a_learning_curve_of_a_real_run_that_learns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "model", seed=5, hidden=32, intermediate=48, layers=2)
    small = [f"model={model}", "rollout.max_tokens=16", "rollout.kv_tokens=2048"]  # the embedded model is to be made
    monkeypatch.setattr(learning, "SMOKE", [*learning.SMOKE, *small])
    found = learning.main(["--smoke", "--runs", str(tmp_path / "runs"), "--picture", str(tmp_path / "out.svg")])
    (row,) = (row for name, row in found.items() if name != "run")
    assert [step for step, _, _ in row["accuracy"]] == [0, 2, 4]
    assert set(row["staleness_histogram"]) == {"0"}


def test_nothing_is_begun_after_the_time_limit() -> None:
    assert lab.Results(None, limit_s=-1).measure("late", lambda: 1) is None
