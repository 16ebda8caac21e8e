"""A run's profile is what its steps cost, however they were told of, and there is none where it cannot be known."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.config.costs import read_profile
from staleflow.coordinator.cost import CostModel
from staleflow.rollout.engine import StepOutput
from staleflow.run.costs import Mean, RunCosts
from staleflow.types import Cell, Costs
from staleflow.workers.meter import Cells

TRUE = CostModel(0.002, 0.002, 5e-5, 0.0, 1e-6, 2e-5)
SIZES = (1, 3, 8, 20, 50, 120)


def step(made: int, context: int, prefilled: int = 0) -> StepOutput:
    return StepOutput([], [], [], made, prefilled, context)


def steps_of(meter: Cells, model: CostModel, share: float, repeats: int = 6) -> None:
    """An instance that had this share of a core."""
    for running, each, _ in product(SIZES, (20, 70), range(repeats)):
        context = running * each
        for prefilled in (0, 64):
            seconds = model.step(running, context, prefilled)
            meter.add(step(running, context, prefilled), seconds / share, seconds)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_costs_of_an_engine_are_found_again(share: float, tmp_path: Path) -> None:
    meter, costs = Cells(), RunCosts()
    steps_of(meter, TRUE, share)
    costs.hear(Costs(meter.drain()))
    found = costs.profile(by_cpu=True)
    assert found is not None
    (tmp_path / "profile.json").write_text(json.dumps(found))
    model = read_profile(str(tmp_path / "profile.json"))
    for running, prefill in product(SIZES, (0, 64)):
        expected = TRUE.step(running, 40 * running, prefill) / share
        assert model.step(running, 40 * running, prefill) == pytest.approx(expected, rel=0.02)
    assert found["cpu_share"] == pytest.approx(share)
    assert costs.means()["instance_cpu_share"] == pytest.approx(share)


def test_where_cpu_time_says_nothing_seconds_are_fitted() -> None:
    meter, costs = Cells(), RunCosts()
    steps_of(meter, TRUE, share=0.5)
    costs.hear(Costs([msgspec.structs.replace(cell, cpu_s=0.0) for cell in meter.drain()]))
    found = costs.profile(by_cpu=False)
    assert found is not None
    assert found["coefficients"]["floor"] == pytest.approx(2 * TRUE.floor, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 200), st.booleans()), min_size=1, max_size=40), st.data())
def test_it_does_not_matter_in_how_many_pieces_it_is_told(steps: list[tuple[int, int, bool]], data: Any) -> None:
    whole, pieces = Cells(), Cells()
    one, other = RunCosts(), RunCosts()
    for running, each, mixed in steps:
        for meter in (whole, pieces):
            meter.add(step(running, running * each, 5 * mixed), 0.001 * running, 0.0005)
        if data.draw(st.booleans()):
            other.hear(Costs(pieces.drain()))
    one.hear(Costs(whole.drain()))
    other.hear(Costs(pieces.drain()))
    assert one.means() == pytest.approx(other.means())
    assert not pieces.drain()


def test_no_memory_grows_with_the_length_of_a_run() -> None:
    meter, costs = Cells(), RunCosts()
    for at in range(20_000):
        running = at % 128 + 1
        meter.add(step(running, running * (at % 100)), 0.1, 0.1)
        if at % 100 == 0:
            costs.hear(Costs(meter.drain()))
    assert len(meter.drain()) < 100


@pytest.mark.parametrize("cells", [[], [Cell(False, 9, 9, 90, 0, 0.1, 0.1)], [Cell(True, 9, 9, 90, 9, 0.1, 0.1)] * 9])
def test_too_few_steps_make_no_profile(cells: list[Cell]) -> None:
    costs = RunCosts()
    costs.hear(Costs(cells))
    assert costs.profile(by_cpu=True) is None
    assert all(value >= 0 for value in costs.means().values())


def test_means_of_pulls_and_reports() -> None:
    costs = RunCosts()
    costs.hear(Costs([], pulls=2, pull_s=0.2, reported=4, reported_s=0.1))
    means = costs.means()
    assert (means["pull_s"], means["report_s"]) == pytest.approx((0.1, 0.025))
    assert Mean().value == 0.0
