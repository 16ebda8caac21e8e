"""Corrections: worked cases, caps and masks that hold, and the measured difference."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.training.correction import (
    LOG_RATIO_LIMIT,
    decoupled,
    difference,
    masked_by_sequence,
    truncated,
    uncorrected,
)
from staleflow.training.packed import Metrics, Segments

from .batches import doubles, quick


def logs(*ratios: float) -> torch.Tensor:
    return doubles(*ratios).log()


# Three sequences of lengths 2, 1, 1 with ratios trainer / behaviour 4, 1/4 (geometric mean 1); 3; 1/2.
BEHAVIOUR = doubles(-1, -2, -3, -4)
PROXIMAL = BEHAVIOUR + logs(4, 1 / 4, 3, 1 / 2)
SEGMENTS = Segments.of([2, 1, 1])


def test_no_correction_takes_the_ratio_against_the_engine():
    correction = uncorrected(PROXIMAL, BEHAVIOUR, SEGMENTS)
    assert correction.anchor_T.tolist() == BEHAVIOUR.tolist()
    assert correction.weights_T.tolist() == [1, 1, 1, 1]
    assert correction.keep_N is None


def test_truncated_weights_stop_at_the_cap():
    correction = truncated(PROXIMAL, BEHAVIOUR, SEGMENTS, importance_cap=2.0)
    torch.testing.assert_close(correction.weights_T, doubles(2, 0.25, 2, 0.5))
    assert correction.anchor_T.tolist() == PROXIMAL.tolist()
    values = correction.metrics.values()
    assert math.isclose(values["weight"], 4.75 / 4)
    assert values["weights_capped"] == 0.5


def test_decoupled_weights_are_the_whole_ratio():
    correction = decoupled(PROXIMAL, BEHAVIOUR, SEGMENTS)
    torch.testing.assert_close(correction.weights_T, doubles(4, 0.25, 3, 0.5))
    assert correction.anchor_T.tolist() == PROXIMAL.tolist()


def test_sequences_are_masked_by_their_geometric_mean():
    # The first has wild tokens that cancel: it stays. The others are 3 and 1/2.
    correction = masked_by_sequence(PROXIMAL, BEHAVIOUR, SEGMENTS, sequence_band=(0.6, 2.0))
    assert correction.keep_N is not None
    assert correction.keep_N.tolist() == [True, False, False]
    assert correction.anchor_T.tolist() == BEHAVIOUR.tolist()
    assert math.isclose(correction.metrics.values()["sequences_masked"], 2 / 3)


def test_the_edges_of_the_mask_are_inside():
    correction = masked_by_sequence(PROXIMAL, BEHAVIOUR, SEGMENTS, sequence_band=(0.49999, 3.00001))
    assert correction.keep_N is not None
    assert correction.keep_N.all()
    exact = masked_by_sequence(BEHAVIOUR, BEHAVIOUR, SEGMENTS, sequence_band=(1, 1))
    assert exact.keep_N is not None
    assert exact.keep_N.all()


def test_nan_is_not_masked_away():
    broken = PROXIMAL.clone()
    broken[2] = math.nan
    masked = masked_by_sequence(broken, BEHAVIOUR, SEGMENTS, sequence_band=(0.6, 2.0))
    assert masked.keep_N is not None
    assert masked.keep_N[1]
    assert truncated(broken, BEHAVIOUR, SEGMENTS).weights_T[2].isnan()


def test_no_gradient_flows_through_a_correction():
    proximal = PROXIMAL.clone().requires_grad_()
    for each in (
        uncorrected(BEHAVIOUR, proximal, SEGMENTS),
        truncated(proximal, BEHAVIOUR, SEGMENTS),
        decoupled(proximal, BEHAVIOUR, SEGMENTS),
        masked_by_sequence(proximal, BEHAVIOUR, SEGMENTS, sequence_band=(0.5, 2)),
    ):
        assert not each.weights_T.requires_grad
        assert not each.anchor_T.requires_grad


@given(
    gaps=st.lists(st.floats(-60, 60), min_size=1, max_size=12),
    cap=st.floats(0.1, 10),
    low=st.floats(0.1, 1),
    high=st.floats(1, 5),
)
@quick(100)
def test_caps_and_masks_hold_for_any_gap(gaps: list[float], cap: float, low: float, high: float):
    behaviour = torch.full((len(gaps),), -2.0, dtype=torch.float64)
    proximal = behaviour + doubles(*gaps)
    segments = Segments.of([len(gaps)])
    weights = truncated(proximal, behaviour, segments, importance_cap=cap).weights_T
    assert weights.isfinite().all()
    assert 0 <= weights.min() <= weights.max() <= cap
    assert decoupled(proximal, behaviour, segments).weights_T.max() <= math.exp(LOG_RATIO_LIMIT)
    keep = masked_by_sequence(proximal, behaviour, segments, sequence_band=(low, high)).keep_N
    assert keep is not None
    middle = math.fsum(gaps) / len(gaps)
    if min(abs(middle - math.log(low)), abs(middle - math.log(high))) > 1e-9:
        assert bool(keep[0]) == (math.log(low) < middle < math.log(high))


def test_the_difference_by_hand():
    # d = 0.1, -0.3, 0: mean 0.4 / 3, largest 0.3, one of three beyond 0.2.
    values = difference(doubles(-0.9, -2.3, -3), doubles(-1, -2, -3), threshold=0.2).values()
    assert math.isclose(values["logprob_difference"], 0.4 / 3)
    assert math.isclose(values["logprob_difference_max"], 0.3)
    assert math.isclose(values["logprob_beyond"], 1 / 3)
    assert math.isclose(values["logprob_kl"], (math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 3)


def test_the_difference_of_chunks_adds_up():
    trainer, behaviour = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = difference(trainer, behaviour).values()
    step = Metrics()
    for part in (slice(0, 3), slice(3, 3), slice(3, 40), slice(40, 50)):
        step = step + difference(trainer[part], behaviour[part])
    assert step.values().keys() == whole.keys()
    assert all(math.isclose(value, whole[name], rel_tol=1e-12) for name, value in step.values().items())


def test_equal_logprobs_have_no_difference():
    assert set(difference(BEHAVIOUR, BEHAVIOUR).values().values()) == {0.0}
