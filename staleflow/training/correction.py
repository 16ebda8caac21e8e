"""Off-policy correction: what to do about tokens that were not drawn from the policy that is trained.

Three policies meet in a step: *behaviour* (the engine, maybe some versions old) drew the tokens, *proximal* (the
trainer's own weights when the step began) is recomputed, and gradients flow through *current*. A ``Correction`` says
which policy the ratio in a loss is taken against, how much each token weighs, and which sequences are left out::

    correction = truncated(proximal_T, behaviour_T, segments, importance_cap=2.0)
    loss = ppo_clip(logprobs_T, advantages_T, segments, correction)
    difference(proximal_T, behaviour_T).values()["logprob_difference"]

A correction, built in or the user's own, is ``correction(proximal_T, behaviour_T, segments, *, knobs) -> Correction``.
With one update per step the proximal policy is the current one. No gradient flows through a correction, and no weight
is ever negative; a NaN stays a NaN, so that it is seen in the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from staleflow.training.packed import Metrics, Segments

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within this: e^20 is far beyond any clip, and keeps exp and its gradient finite."""


@dataclass(frozen=True)
class Correction:
    anchor_T: Tensor
    """Log-probabilities below the ratio of a loss."""
    weights_T: Tensor
    """What each token's loss is multiplied by, outside of any clip."""
    keep_N: Tensor | None = None
    """Which sequences are trained on; None: all. The others count neither in the sum nor in the normaliser."""
    metrics: Metrics = field(default_factory=Metrics)


def log_ratio(above_T: Tensor, below_T: Tensor) -> Tensor:
    """log(pi_above / pi_below), held within the limit."""
    return (above_T - below_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def uncorrected(proximal_T: Tensor, behaviour_T: Tensor, segments: Segments) -> Correction:  # noqa: ARG001
    """No correction: ratio = pi / behaviour, weight = 1. Only the clip of the loss limits off-policy tokens."""
    behaviour_T = behaviour_T.detach()
    return Correction(behaviour_T, torch.ones_like(behaviour_T))


@torch.no_grad()
def truncated(
    proximal_T: Tensor,
    behaviour_T: Tensor,
    segments: Segments,  # noqa: ARG001
    *,
    importance_cap: float = 2.0,
) -> Correction:
    """Truncated importance sampling by token: ratio = pi / proximal, weight = min(proximal / behaviour, cap).

    The cap bounds the variance and biases the tokens above it.
    """
    _check_same(proximal_T, behaviour_T)
    raw_T = log_ratio(proximal_T, behaviour_T).exp()
    weights_T = raw_T.clamp(max=importance_cap)
    return Correction(proximal_T.detach(), weights_T, None, _weights(weights_T, raw_T > importance_cap))


@torch.no_grad()
def masked_by_sequence(
    proximal_T: Tensor,
    behaviour_T: Tensor,
    segments: Segments,
    *,
    sequence_band: tuple[float, float] = (0.5, 2.0),
) -> Correction:
    """Leave out sequence i unless exp(1/|o_i| sum_t log(proximal_t / behaviour_t)) is inside the band.

    The others are as without a correction: ratio = pi / behaviour, weight = 1.
    """
    low, high = sequence_band
    _check_same(proximal_T, behaviour_T)
    means_N = segments.mean(proximal_T - behaviour_T)
    # Not "inside", but "not outside": a NaN must reach the loss and be seen there.
    keep_N = ~((means_N < math.log(low)) | (means_N > math.log(high)))
    masked = Metrics({"sequences_masked": ((~keep_N).sum(), segments.sequences)})
    return replace(uncorrected(proximal_T, behaviour_T, segments), keep_N=keep_N, metrics=masked)


@torch.no_grad()
def decoupled(proximal_T: Tensor, behaviour_T: Tensor, segments: Segments) -> Correction:  # noqa: ARG001
    """Decoupled PPO: ratio = pi / proximal inside the clip, weight = proximal / behaviour outside.

    The trust region is around where the step began, not around old weights. Weights are unbiased and unbounded;
    ``truncated`` is the same with a bound.
    """
    _check_same(proximal_T, behaviour_T)
    weights_T = log_ratio(proximal_T, behaviour_T).exp()
    return Correction(proximal_T.detach(), weights_T, None, _weights(weights_T))


@torch.no_grad()
def difference(trainer_T: Tensor, behaviour_T: Tensor, threshold: float = 0.1) -> Metrics:
    """How far the trainer's log-probabilities are from the engine's, for d = trainer - behaviour.

    ``logprob_difference``      mean |d|
    ``logprob_difference_max``  max |d|
    ``logprob_kl``              mean of exp(d) - 1 - d, which estimates KL(behaviour || trainer) and is never negative
    ``logprob_beyond``          share of tokens with |d| > threshold

    Over all tokens it measures staleness and numerics together; over those of the trainer's own version, numerics only.
    """
    if not threshold > 0:
        raise ValueError(f"threshold={threshold}: give a difference of log-probabilities above 0, such as 0.1")
    _check_same(trainer_T, behaviour_T)
    count = trainer_T.numel()
    if count == 0:
        return Metrics()
    apart_T = (trainer_T - behaviour_T).abs()
    held_T = log_ratio(trainer_T, behaviour_T)
    sums = {
        "logprob_difference": (apart_T.sum(), count),
        "logprob_kl": ((held_T.expm1() - held_T).sum(), count),
        "logprob_beyond": ((apart_T > threshold).sum(), count),
    }
    return Metrics(sums, {"logprob_difference_max": apart_T.max()})


def _weights(weights_T: Tensor, capped_T: Tensor | None = None) -> Metrics:
    count = weights_T.numel()
    capped = {} if capped_T is None else {"weights_capped": (capped_T.sum(), count)}
    return Metrics({"weight": (weights_T.sum(), count)} | capped)


def _check_same(trainer_T: Tensor, behaviour_T: Tensor) -> None:
    if trainer_T.ndim != 1 or trainer_T.shape != behaviour_T.shape:
        raise ValueError(
            f"the trainer's log-probabilities have shape {tuple(trainer_T.shape)}, the engine's "
            f"{tuple(behaviour_T.shape)}: give both flat, one value for each generated token"
        )
