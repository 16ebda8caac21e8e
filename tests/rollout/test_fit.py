"""The fit of the cost model finds what made the points, and says how far off it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.config.cluster import takes_time
from staleflow.coordinator.cost import CostModel
from staleflow.rollout.fit import Point, fit

GRID = [(n, n * context) for n in (1, 2, 4, 8, 16, 32, 64) for context in (64, 256, 1024)]


def points(model: CostModel, noise: float = 0.0, seed: int = 0) -> list[Point]:
    random = np.random.default_rng(seed)
    return [Point(n, c, model.step(n, c) * float(1 + noise * random.uniform(-1, 1))) for n, c in GRID]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    floor=st.floats(1e-4, 1e-1),
    corner=st.sampled_from([0, 1, 4, 16, 64]),
    per_sequence=st.floats(1e-6, 1e-2),
    per_context=st.floats(1e-9, 1e-5),
)
def test_a_fit_predicts_what_such_a_machine_does(
    floor: float, corner: int, per_sequence: float, per_context: float
) -> None:
    true = CostModel(floor, floor - per_sequence * corner, per_sequence, 0.0, per_context, 0.0)
    found, errors = fit(points(true))
    assert errors.mean < 1e-6
    for n, c in ((3, 500), (24, 9_000), (64, 70_000)):
        off = abs(found.step(n, c) / true.step(n, c) - 1)
        assert off < (1e-6 if n >= corner or corner <= 1 else 0.5)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_the_error_it_reports_grows_with_the_noise_in_the_points(noise: float) -> None:
    _, errors = fit(points(CostModel(2e-3, 1e-3, 1e-4, 0.0, 1e-7, 0.0), noise))
    assert noise / 5 < errors.mean < noise
    assert errors.mean < errors.worst
    assert errors.mean < errors.unseen < 3 * noise


def test_no_coefficient_is_negative_however_strange_the_points() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        found, _ = fit([Point(n, c, float(random.uniform(1e-3, 1e-2))) for n, c in GRID])
        assert min(found.floor, found.per_sequence, found.per_context_token) >= 0


def test_a_noisy_run_leaves_costs_that_it_can_be_planned_with() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        some = random.choice(len(GRID), 4, replace=False)
        drawn = [Point(n, c, float(random.uniform(1e-4, 1e-2))) for n, c in (GRID[at] for at in some)]
        if len({point.running for point in drawn}) > 1:
            found, _ = fit(drawn)
            assert takes_time({name: getattr(found, name) for name in type(found).__slots__})


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="measure at least 4, with 2 sizes of batch"):
        fit([Point(4, 100, 0.01)] * 6)
