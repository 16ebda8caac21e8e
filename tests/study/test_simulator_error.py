"""The report on the simulator's error keeps what was calibrated with apart from what was predicted."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from staleflow.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "bench" / "simulator_error.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulator_error", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(bench: ModuleType, name: str, calibration: bool, simulated: float) -> dict[str, Any]:
    metrics = {key: bench.compared(key, 0.5, simulated) for key in bench.METRICS}
    return {"setting": name, "seed": 0, "calibration": calibration, "metrics": metrics, "fixed_shares": metrics}


def results(bench: ModuleType, simulated: float) -> dict[str, Any]:
    rows = [row(bench, "bound 2", True, 0.9), row(bench, "bound 1", False, simulated)]
    about = {"alone": 0.95, "trainer_beside_instances": 0.6}
    return {"steps": 30, "cores": 2, "calibration": about, "rows": rows, "worst": bench.worst(rows)}


def test_the_calibration_is_a_table_of_its_own_and_does_not_count(bench: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(json.dumps(results(bench, 0.54)))
    text = bench.section(tmp_path / "found.json")
    calibrated, predicted = text.split("\n\n")[1:3]
    assert ("bound 2" in calibrated, "bound 1" in calibrated) == (True, False)
    assert ("bound 2" in predicted, "bound 1" in predicted) == (False, True)
    assert "tokens/s 8.0 % (within 10 %)" in text, "0.9 for 0.5 in the calibration is not an error of a prediction"
    assert "beyond 10 %" in bench.section(results(bench, 0.4))


def test_errors_are_percent_but_for_shares_and_zero(bench: ModuleType) -> None:
    assert bench.compared("tokens_per_s", 200.0, 210.0)["error"] == pytest.approx(5)
    assert bench.compared("trainer_idle", 0.03, 0.05)["error"] == pytest.approx(2), "points, not percent"
    assert bench.compared("mean_staleness", 0.0, 0.0)["error"] == 0
    assert bench.compared("mean_staleness", 0.0, 0.1)["error"] == 100


def test_the_calibration_is_always_run(bench: ModuleType) -> None:
    kinds = bench.kinds_of("0,1", seeds=2, steps=30)
    assert bench.Kind(2, 0) in kinds
    assert len(kinds) == len(set(kinds)) == 8
    assert sum(kind.consume == "batch" for kind in kinds) == 2


@pytest.mark.parametrize(
    ("bounds", "seeds", "steps", "said"),
    [
        ("0,x", 1, 30, "--bounds 0,x cannot be read"),
        ("-1", 1, 30, "is impossible"),
        ("1", 0, 30, "is impossible"),
        ("3", 1, 5, "--steps 5 are too few"),
        ("2", 1, 30, "is the calibration alone"),
    ],
)
def test_what_cannot_be_run_is_one_line(bench: ModuleType, bounds: str, seeds: int, steps: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench.kinds_of(bounds, seeds, steps)


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_results_that_are_none_are_one_line(bench: ModuleType, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "found.json").write_text(text)
    with pytest.raises(ConfigError, match=r"found\.json"):
        bench.read_results(tmp_path / "found.json")
