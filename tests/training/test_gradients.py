"""Gradients against finite differences, in double precision and away from the kinks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from staleflow.training.correction import Correction, masked_by_sequence
from staleflow.training.losses import (
    cispo,
    dapo,
    entropy_bonus,
    gspo,
    kl_loss,
    ppo_clip,
    value_loss,
)
from staleflow.training.packed import TOKEN_MEAN, LossSum, Segments

from .batches import AGGREGATIONS, token_entropy

SEGMENTS = Segments.of([3, 1, 4])
# Ratios of 0.61, 0.95, 1.05, 1.49 and 3.3, on both signs: inside the clip, on either side of it, beyond the dual clip.
LOG_RATIOS = torch.tensor([-0.5, 0.05, 0.4, 0.4, -0.5, -0.05, 1.2, 1.2], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -0.5, -0.5, -0.5, 2.0], dtype=torch.float64)
LOGPROBS = torch.linspace(-3, -0.5, 8, dtype=torch.float64)
WEIGHTS = torch.linspace(0.3, 1.7, 8, dtype=torch.float64)
CORRECTION = Correction(LOGPROBS - LOG_RATIOS, WEIGHTS, torch.tensor([True, True, True]))
MASKED = masked_by_sequence(LOGPROBS, LOGPROBS - LOG_RATIOS, SEGMENTS, sequence_band=(0.5, 1.4))


def check(loss: Callable[[Tensor], LossSum], at: Tensor) -> None:
    assert gradcheck(lambda x: loss(x).mean, at.clone().requires_grad_())


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda each: each.kind)
@pytest.mark.parametrize("correction", [CORRECTION, MASKED], ids=["weighted", "masked"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ppo(aggregation, correction, dual_clip):
    check(lambda x: ppo_clip(x, ADVANTAGES, SEGMENTS, correction, aggregation, dual_clip=dual_clip), LOGPROBS)


def test_dapo():
    check(lambda x: dapo(x, ADVANTAGES, SEGMENTS, CORRECTION), LOGPROBS)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda each: each.kind)
def test_gspo_with_one_advantage_for_a_sequence(aggregation):
    # Mean log-ratios -0.017, 0.4 and 0.46: inside, and beyond the upper clip with either sign.
    correction = Correction(CORRECTION.anchor_T, SEGMENTS.spread(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)))
    for signs in ([1.0, -1.0, 1.0], [-1.0, 1.0, -2.0]):
        advantages_T = SEGMENTS.spread(torch.tensor(signs, dtype=torch.float64))
        check(
            lambda x, a=advantages_T: gspo(x, a, SEGMENTS, correction, aggregation, eps_low=0.1, eps_high=0.2), LOGPROBS
        )


def test_cispo_has_the_gradient_of_its_clipped_weight():
    # Where the weight is clipped it is a constant, and finite differences see what autograd does.
    clipped = Correction(LOGPROBS - 1.0, WEIGHTS)
    check(lambda x: cispo(x, ADVANTAGES, SEGMENTS, clipped, eps_high=0.5), LOGPROBS)
    # Where it is not, the gradient is that of w sg(r) A log pi, by the formula.
    logprobs_T = LOGPROBS.clone().requires_grad_()
    (found,) = torch.autograd.grad(cispo(logprobs_T, ADVANTAGES, SEGMENTS, CORRECTION).total, logprobs_T)
    torch.testing.assert_close(found, -WEIGHTS * LOG_RATIOS.exp() * ADVANTAGES)


def test_kl():
    check(lambda x: kl_loss(x, LOGPROBS - LOG_RATIOS, SEGMENTS, TOKEN_MEAN, MASKED.keep_N), LOGPROBS)


def test_entropy():
    logits_TV = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check(lambda x: entropy_bonus(token_entropy(x), SEGMENTS), logits_TV)


def test_value():
    old_T = torch.zeros(8, dtype=torch.float64)
    returns_T = torch.tensor([1, -1, 0.1, 0.3, 2, -2, 0, 0.05], dtype=torch.float64)
    values_T = torch.tensor([0.5, 0.5, 0.1, -0.1, -0.5, 0.15, 0.4, -0.3], dtype=torch.float64)
    check(lambda x: value_loss(x, returns_T, old_T, SEGMENTS, eps=0.2), values_T)
