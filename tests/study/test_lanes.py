"""Lanes: what is computed for a fleet in balance."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.simulate.setting import Setting, preset
from staleflow.study.law import BatchWork, ceiling, work_of

SCRIPT = Path(__file__).parents[2] / "bench" / "lanes.py"


@pytest.fixture(scope="module")
def lanes() -> Callable[[Setting, BatchWork, int], float]:
    spec = importlib.util.spec_from_file_location("lanes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.lanes


@pytest.mark.parametrize("staleness", [1, 4])
def test_lanes_keep_the_law_and_two_allow_no_less_than_one(
    lanes: Callable[[Setting, BatchWork, int], float], staleness: int
) -> None:
    setting = replace(preset("paper-14b"), groups=16, instances=6, training_gpus=6, staleness=staleness)
    work = work_of(setting)
    one, two = lanes(setting, work, 1), lanes(setting, work, 2)
    assert 0 < one <= two <= ceiling(setting, True, work).tokens_per_s * (1 + 1e-9)


def test_a_looser_bound_allows_more_until_training_binds(lanes: Callable[[Setting, BatchWork, int], float]) -> None:
    setting = replace(preset("paper-14b"), groups=16, instances=6, training_gpus=6)
    work = work_of(setting)
    found = [lanes(replace(setting, staleness=bound), work, 1) for bound in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[0] < found[-1]
