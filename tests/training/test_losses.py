"""Losses: worked cases, where gradients must vanish, and equality with loops over sequences."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from staleflow.registry import Registry
from staleflow.training.correction import Correction, decoupled, truncated, uncorrected
from staleflow.training.losses import (
    cispo,
    dapo,
    entropy_bonus,
    gspo,
    kl_loss,
    policy_loss,
    ppo_clip,
    value_loss,
)
from staleflow.training.options import CORRECTIONS, LOSSES, TrainerOptions
from staleflow.training.packed import SEQUENCE_MEAN, TOKEN_MEAN, Aggregation, LossSum, Segments

from . import oracle
from .batches import AGGREGATIONS, EPS, KNOBS, Batch, Model, advantages, batches, correction, doubles, quick


def at_ratios(*ratios: float) -> tuple[Tensor, Correction]:
    """Current log-probabilities, all -1, against an anchor that makes these ratios."""
    logprobs_T = torch.full((len(ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    return logprobs_T, uncorrected(logprobs_T, -1 - doubles(*ratios).log(), Segments.of([len(ratios)]))


def gradient(loss: LossSum, logprobs_T: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.total, logprobs_T)
    return found.tolist()


def close(found: Sequence[float] | Tensor, expected: Sequence[float]) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64).detach(), doubles(*expected))


def test_ppo_by_hand_in_every_region():
    # eps 0.2 and 0.3; A = 2 at ratios 0.5, 1.1, 1.5 and A = -4 at the same and 0.4. -min(rA, clip(r)A):
    #   2: -1, -2.2, -2.6 (clipped above)        -4: 3.2 (clipped below), 4.4, 6, 3.2 (clipped below)
    ratios = (0.5, 1.1, 1.5, 0.5, 1.1, 1.5, 0.4)
    logprobs_T, anchor = at_ratios(*ratios)
    advantages_T = doubles(2, 2, 2, -4, -4, -4, -4)
    loss = ppo_clip(logprobs_T, advantages_T, Segments.of([3, 4]), anchor, eps_low=0.2, eps_high=0.3)
    close([loss.total.item()], [-1 - 2.2 - 2.6 + 3.2 + 4.4 + 6 + 3.2])
    close([loss.mean.item()], [11 / 7])
    # d(rA)/dlogp = rA where the clip is not active, and nothing where it is: with the advantage, on its own side.
    close(gradient(loss, logprobs_T), [-1, -2.2, 0, 0, 4.4, 6, 0])
    values = loss.metrics.values()
    close([values["clip_low"], values["clip_high"]], [2 / 7, 1 / 7])
    close([values["ratio"], values["ratio_max"]], [sum(ratios) / 7, 1.5])
    close([values["approx_kl"]], [sum(r - 1 - math.log(r) for r in ratios) / 7])


def test_dual_clip_stops_the_pull_of_tokens_that_became_too_likely():
    # c = 3: A = -1 at ratio 4 costs 3 instead of 4 and has no gradient; at ratio 2, and at A = 1, nothing changes.
    logprobs_T, anchor = at_ratios(4, 2, 4)
    loss = ppo_clip(logprobs_T, doubles(-1, -1, 1), Segments.of([3]), anchor, dual_clip=3.0)
    close([loss.total.item()], [3 + 2 - 1.2])
    close(gradient(loss, logprobs_T), [0, 2, 0])
    close([loss.metrics.values()["clip_dual"]], [1 / 3])


def test_each_side_of_the_clip_can_be_turned_off():
    logprobs_T, anchor = at_ratios(0.01, 50)
    loss = ppo_clip(logprobs_T, doubles(-1, 1), Segments.of([2]), anchor, eps_low=1.0, eps_high=math.inf)
    close(gradient(loss, logprobs_T), [0.01, -50])


def test_dapo_clips_higher_above_and_takes_the_mean_of_all_tokens():
    # 1.25 is beyond 1.2 and within 1.28; lengths 1 and 3 weigh by tokens.
    logprobs_T, anchor = at_ratios(1.25, 1.3, 1, 1)
    loss = dapo(logprobs_T, doubles(1, 1, 1, 1), Segments.of([1, 3]), anchor)
    close([loss.mean.item()], [-(1.25 + 1.28 + 1 + 1) / 4])
    close(gradient(loss, logprobs_T), [-1.25, 0, -1, -1])
    dual = dapo(logprobs_T, doubles(-1, -1, -1, -1), Segments.of([1, 3]), anchor, dual_clip=1.28)
    close(gradient(dual, logprobs_T), [1.25, 0, 1, 1])


def test_gspo_by_hand():
    # Sequence 1: ratios 2 and 1/2, geometric mean 1: nothing is clipped. Sequence 2: 1.44 and 1: mean 1.2, clipped at
    # 1.1 for A = 1. Sequence 3 the same with A = -1: not clipped. By sequence: -3, -1.1, 1.2.
    logprobs_T, anchor = at_ratios(2, 0.5, 1.44, 1, 1.44, 1)
    loss = gspo(logprobs_T, doubles(3, 3, 1, 1, -1, -1), Segments.of([2, 2, 2]), anchor, eps_low=0.1, eps_high=0.1)
    close([loss.mean.item()], [(-3 - 1.1 + 1.2) / 3])
    # ds/dlogp_t = s / |o|.
    close(gradient(loss, logprobs_T), [-1.5, -1.5, 0, 0, 0.6, 0.6])
    close([loss.metrics.values()["clip_high"]], [1 / 3])


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # Ratios 0.5, 1.25, 3 with weights held in [0.8, 1.3]; log pi = -1: l = w A.
    logprobs_T, anchor = at_ratios(0.5, 1.25, 3, 3)
    loss = cispo(logprobs_T, doubles(1, 1, 1, -1), Segments.of([4]), anchor, eps_low=0.2, eps_high=0.3)
    close([loss.total.item()], [0.8 + 1.25 + 1.3 - 1.3])
    close(gradient(loss, logprobs_T), [-0.8, -1.25, -1.3, 1.3])
    values = loss.metrics.values()
    close([values["clip_low"], values["clip_high"]], [1 / 4, 1 / 2])


def test_weights_stand_outside_of_the_clip():
    # Decoupled: proximal / behaviour = 2 multiplies what the clip of pi / proximal = 1.5 leaves.
    behaviour_T, proximal_T = doubles(-2), doubles(-2 + math.log(2))
    logprobs_T = (proximal_T + math.log(1.5)).requires_grad_()
    correct = decoupled(proximal_T, behaviour_T, Segments.of([1]))
    close([ppo_clip(logprobs_T, doubles(1), Segments.of([1]), correct).total.item()], [-2 * 1.2])
    close([ppo_clip(logprobs_T, doubles(-1), Segments.of([1]), correct).total.item()], [2 * 1.5])
    capped = truncated(proximal_T, behaviour_T, Segments.of([1]), importance_cap=1.75)
    loss = ppo_clip(logprobs_T, doubles(1), Segments.of([1]), capped)
    close([loss.total.item()], [-1.75 * 1.2])
    close([loss.metrics.values()[name] for name in ("weight", "weights_capped")], [1.75, 1])


def test_the_three_aggregations_by_hand():
    # Entropies 1 | 2 4 6: sums 1 and 12, means 1 and 4.
    segments, entropy_T = Segments.of([1, 3]), doubles(1, 2, 4, 6)
    found = [entropy_bonus(entropy_T, segments, each).mean for each in (TOKEN_MEAN, SEQUENCE_MEAN)]
    fixed = entropy_bonus(entropy_T, segments, Aggregation("fixed-length", 10)).mean
    close([each.item() for each in (*found, fixed)], [-13 / 4, -5 / 2, -13 / 20])


def test_masked_sequences_leave_the_sum_and_the_normaliser():
    segments, keep_N = Segments.of([1, 3, 1]), torch.tensor([True, False, True])
    for aggregation in AGGREGATIONS:
        masked = entropy_bonus(doubles(1, 2, math.inf, 6, 4), segments, aggregation, keep_N)
        alone = entropy_bonus(doubles(1, 4), Segments.of([1, 1]), aggregation)
        close([masked.mean.item()], [alone.mean.item()])
        assert (masked.tokens, masked.sequences) == (2, 2)
        assert masked.metrics.values() == alone.metrics.values()


def test_a_step_in_which_all_is_masked_changes_nothing():
    entropy_T = doubles(1, 2).requires_grad_()
    loss = entropy_bonus(entropy_T, Segments.of([2]), TOKEN_MEAN, torch.tensor([False]))
    loss.total.backward()
    assert (loss.scale, loss.mean.item(), loss.metrics.values()["entropy"]) == (0.0, 0.0, 0.0)
    assert entropy_T.grad is not None
    assert entropy_T.grad.tolist() == [0, 0]


def test_value_loss_takes_the_worse_of_clipped_and_not():
    # V_old = 1, eps = 0.5. V = 3 towards R = 3 would be perfect, but counts as 1.5: (1.5 - 3)^2 / 2, no gradient.
    # V = 3 towards R = 0: 9 / 2, gradient 3. V = 1.2 towards 2: 0.64 / 2, gradient -0.8.
    values_T = doubles(3, 3, 1.2).requires_grad_()
    loss = value_loss(values_T, doubles(3, 0, 2), doubles(1, 1, 1), Segments.of([3]), eps=0.5)
    close([loss.total.item()], [1.125 + 4.5 + 0.32])
    close(gradient(loss, values_T), [0, 3, -0.8])
    values = loss.metrics.values()
    close([values["value_clip"], values["returns"], values["returns_squared"]], [1 / 3, 5 / 3, 13 / 3])
    close([values["value_error_squared"]], [(0 + 9 + 0.64) / 3])


def test_the_kl_to_the_reference_is_right_on_average_and_by_hand():
    # d = log pi - log reference = log 2 and -log 2: exp(-d) - 1 + d.
    logprobs_T, reference_T = doubles(-1, -1), doubles(-1 - math.log(2), -1 + math.log(2))
    two, pair = math.log(2), Segments.of([1, 1])
    close([kl_loss(logprobs_T, reference_T, pair).total.item()], [0.5 - 1 + two + 2 - 1 - two])
    # Over all of a small vocabulary, weighed by pi, it is the KL.
    logits_V, other_V = torch.randn(2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    log_p_V, log_q_V = logits_V.log_softmax(0), other_V.log_softmax(0)
    each = [kl_loss(log_p_V[at : at + 1], log_q_V[at : at + 1], Segments.of([1])).total for at in range(6)]
    kl = (log_p_V.exp() * (log_p_V - log_q_V)).sum()
    close([(log_p_V.exp() * torch.stack(each)).sum().item()], [kl.item()])


def test_terms_join_with_their_coefficients():
    logprobs_T, anchor = at_ratios(1, 1)
    segments = Segments.of([1, 1])
    policy = ppo_clip(logprobs_T, doubles(1, 2), segments, anchor)
    joined = policy.plus(kl_loss(logprobs_T, logprobs_T - math.log(2), segments), 0.5)
    joined = joined.plus(entropy_bonus(doubles(1, 3), segments), 0.1)
    kl = 0.5 - 1 + math.log(2)
    close([joined.mean.item()], [(-3 + 0.5 * 2 * kl - 0.1 * 4) / 2])
    close([joined.metrics.values()[name] for name in ("kl_reference", "entropy", "ratio")], [kl, 2, 1])


def test_no_gradient_flows_into_advantages():
    # Else a value head would be trained to flatter the policy.
    logprobs_T, anchor = at_ratios(1.1, 0.9)
    gains_T = doubles(1, -1).requires_grad_()
    for name in LOSSES.entries:
        loss = LOSSES.load(name)(logprobs_T, gains_T, Segments.of([2]), anchor)
        assert torch.autograd.grad(loss.total, gains_T, allow_unused=True) == (None,)


def test_an_enormous_ratio_stays_finite():
    logprobs_T = torch.tensor([-1.0, -500.0], requires_grad=True)
    segments = Segments.of([2])
    anchor = uncorrected(logprobs_T, torch.tensor([-400.0, -1]), segments)
    for name in LOSSES.entries:
        loss = LOSSES.load(name)(logprobs_T, torch.tensor([-1.0, 1.0]), segments, anchor)
        (found,) = torch.autograd.grad(loss.total, logprobs_T)
        assert loss.total.isfinite(), name
        assert found.isfinite().all(), name


@pytest.mark.parametrize("name", LOSSES.entries)
def test_on_policy_every_loss_has_the_plain_policy_gradient(name: str):
    # Even with a clip of width 0, on which ratio 1 lies.
    segments, advantages_T = Segments.of([2, 3]), doubles(1, 1, -2, -2, -2)
    for knobs in ({}, {"eps_low": 0.0, "eps_high": 0.0}):
        logprobs_T, anchor = at_ratios(1, 1, 1, 1, 1)
        loss = LOSSES.load(name)(logprobs_T, advantages_T, segments, anchor, TOKEN_MEAN, **knobs)
        close(gradient(loss, logprobs_T), (-advantages_T).tolist())
        values = loss.metrics.values()
        assert (values["ratio"], values["approx_kl"], values["clip_low"], values["clip_high"]) == (1, 0, 0, 0)


@pytest.mark.parametrize("kind", CORRECTIONS.entries)
@pytest.mark.parametrize("name", LOSSES.entries)
@given(batch=batches(), advantage=st.sampled_from(["grpo", "gae"]), aggregation=st.sampled_from(AGGREGATIONS))
@quick(20)
def test_packed_equals_loops_over_sequences(
    name: str, kind: str, batch: Batch, advantage: str, aggregation: Aggregation
):
    model, segments = Model(), batch.segments
    advantages_T = advantages(advantage, batch, model)
    logprobs_T = model.logprobs(batch)
    behaviour_T = (logprobs_T + batch.noise_T).detach()
    proximal_T = (logprobs_T + 0.5 * batch.noise_T.flip(0)).detach()
    correct = correction(kind, proximal_T, behaviour_T, segments)
    found = LOSSES.load(name)(logprobs_T, advantages_T, segments, correct, aggregation, **EPS[name]).mean
    expected = _by_loops(name, kind, (logprobs_T, proximal_T, behaviour_T, advantages_T), batch.lengths, aggregation)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if expected.requires_grad:
        pairs = [torch.autograd.grad(each, model.policy, retain_graph=True)[0] for each in (found, expected)]
        torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "aggregation"),
    [
        ({}, TOKEN_MEAN),
        ({"loss": "gspo"}, SEQUENCE_MEAN),
        ({"advantage": "dr_grpo"}, Aggregation("fixed-length", 9)),
        ({"advantage": "dr_grpo", "loss": "ppo"}, Aggregation("fixed-length", 9)),
        ({"advantage": "dr_grpo", "loss": "gspo"}, SEQUENCE_MEAN),
        ({"advantage": "dr_grpo", "aggregation": "token-mean"}, TOKEN_MEAN),
        ({"aggregation": "sequence-mean"}, SEQUENCE_MEAN),
        ({"aggregation": "fixed-length"}, Aggregation("fixed-length", 9)),
    ],
)
def test_each_loss_and_advantage_has_its_own_aggregation(options: dict[str, Any], aggregation: Aggregation):
    assert policy_loss(TrainerOptions(0, max_tokens=9, **options))[1] == aggregation


def test_a_fixed_length_without_a_length_is_refused():
    with pytest.raises(ValueError, match="give max_tokens too"):
        policy_loss(TrainerOptions(0, "dr_grpo"))
    with pytest.raises(ValueError, match="give max_tokens too"):
        TrainerOptions(0, aggregation="fixed-length")


@pytest.mark.parametrize("registry", [LOSSES, CORRECTIONS], ids=lambda each: each.setting)
def test_knobs_read_from_the_source_are_those_of_the_function(registry: Registry[Any]):
    for name in registry.entries:
        parameters = inspect.signature(registry.load(name)).parameters
        assert registry.knobs(name) == tuple(parameters)[len(registry.takes) :]
        assert tuple(parameters)[: len(registry.takes)] == registry.takes


def _by_loops(name: str, kind: str, flat: tuple[Tensor, ...], lengths: list[int], aggregation: Aggregation) -> Tensor:
    losses: list[Tensor] = []
    eps: dict[str, Any] = EPS[name]
    for logprobs, proximal, behaviour, gains in zip(*(oracle.by_sequence(f, lengths) for f in flat), strict=True):
        anchor, weights, kept = oracle.correct(kind, proximal, behaviour, KNOBS)
        if kept:
            losses.append(weights * oracle.token_losses(name, logprobs, anchor, gains, **eps))
    return oracle.mean_loss(losses, aggregation)
