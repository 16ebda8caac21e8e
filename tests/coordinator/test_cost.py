"""The cost model: its formula, its closed form, and the first guess from a model's shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.cost import CostModel
from staleflow.simulate.setting import preset

STEP = preset("paper-14b").rollout


@given(st.integers(1, 200), st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 4096))
def test_many_steps_at_once_take_as_long_as_one_after_the_other(
    count: int, running: int, context: int, prefill: int
) -> None:
    one_by_one = sum(STEP.step(running, context + number * running, prefill) for number in range(count))
    assert STEP.steps(count, running, context, prefill) == pytest.approx(one_by_one)


def test_a_step_costs_the_floor_until_there_are_enough_sequences_to_exceed_it() -> None:
    knee = (STEP.floor - STEP.base) / STEP.per_sequence
    assert STEP.step(1, 0) == STEP.step(int(knee), 0) < STEP.step(int(knee) + 1, 0)


def test_the_guess_from_geometry_is_near_the_published_fit_of_a_14b_model() -> None:
    """Qwen 14B: 48 layers, 8 KV heads of 128; an H20 has 4 TB/s and 148 TFLOP/s."""
    guess = CostModel.from_geometry(14.75e9, 48, 8, 128, bandwidth=4.0e12, flops=148e12)
    assert guess.floor == pytest.approx(STEP.floor, rel=0.3)
    assert guess.per_context_token == pytest.approx(STEP.per_context_token, rel=0.3)
    assert guess.per_sequence == pytest.approx(STEP.per_sequence, rel=0.8)
