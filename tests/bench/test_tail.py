"""The experiment runs, and what was measured is not measured again."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "bench" / "gpu" / "tail.py"


@pytest.fixture
def tail() -> Any:
    spec = importlib.util.spec_from_file_location("tail", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_smoke_and_resume(tail: Any, tmp_path: Path) -> None:
    path = tmp_path / "tail.json"
    found = tail.main(["--smoke", "--output", str(path)])
    assert found["skewed few"]["steps"] >= found["skewed few"]["steps_with_at_most_32"] > 0
    assert {"tiny 1 x 32 plain", "tiny 2 x 32 few", "tiny 4 x 32 few"} <= set(found)
    changed = json.loads(path.read_text()) | {"skewed few": {"seconds": -1.0}}
    path.write_text(json.dumps(changed))
    assert tail.main(["--smoke", "--output", str(path)])["skewed few"] == {"seconds": -1.0}
