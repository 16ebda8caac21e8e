"""An engine of the user's own: a mistake in its code is told from what may pass."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from staleflow.rollout.engine import Request, StepOutput
from staleflow.workers.own_engine import FirstTokenError, watched

CODE = """
class Engine:
    busy = True

    def __init__(self, outputs):
        self.outputs = list(outputs)

    def submit(self, requests):
        requests[0].nothing

    def step(self):
        output = self.outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output
"""
NOTHING, TOKEN = StepOutput([], [], []), StepOutput([], [], [], made=1)
NAME = "rollout.engine=slips:Engine"


@pytest.fixture
def slips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "slips.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slips", raising=False)
    return importlib.import_module("slips")


def engine(slips: Any, *outputs: object) -> Any:
    return watched(slips.Engine(outputs), "slips:Engine")


def test_a_mistake_before_the_first_token_names_the_setting_and_the_line(slips: Any) -> None:
    """An engine that raised in ``step`` was started again six times, and the message named neither."""
    each = engine(slips, NOTHING, KeyError("x"))
    assert each.step() is NOTHING
    with pytest.raises(FirstTokenError) as error:
        each.step()
    assert str(error.value) == f"{NAME} failed (KeyError: 'x' at slips.py, line 14)"
    with pytest.raises(FirstTokenError, match=r"'Request' object has no attribute 'nothing' at slips.py, line 9\)$"):
        engine(slips).submit([Request("a", 1, [5])])
    with pytest.raises(FirstTokenError, match=f"^{NAME}: step returned .* type NoneType: return a StepOutput$"):
        engine(slips, None).step()


def test_what_comes_after_a_token_is_raised_as_it_is(slips: Any) -> None:
    each = engine(slips, TOKEN, KeyError("after an hour"))
    assert each.busy
    each.step()
    with pytest.raises(KeyError, match="after an hour"):
        each.step()


@pytest.mark.parametrize("error", [MemoryError("full"), ConnectionError("away"), TimeoutError("late")])
def test_what_may_pass_is_no_mistake(slips: Any, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        engine(slips, error).step()


def test_what_the_code_of_others_raises_is_no_mistake_of_the_users(slips: Any) -> None:
    each = watched(slips.Engine([]), "slips:Engine")
    each.__dict__["_files"] = ["elsewhere.py"]
    with pytest.raises(IndexError):
        each.step()


def test_a_built_in_engine_is_left_as_it_is(slips: Any) -> None:
    each = slips.Engine([])
    assert watched(each, "builtin") is each
