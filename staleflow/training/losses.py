"""Token-level objectives, as sums that a trainer can stream.

Each loss takes current log-probabilities, advantages and a correction, all flat, and returns a ``LossSum``: the sum
that gradients come from, its counts, and metrics that add up over passes::

    loss = dapo(logprobs_T, advantages_T, segments, truncated(logprobs_T, behaviour_T))
    loss = loss.plus(kl_loss(logprobs_T, reference_T, segments, loss.aggregation), 0.01)
    loss.total.backward()                       # then scale_gradients(..., step.scale), see packed.py

A policy loss, built in or the user's own, is ``loss(logprobs_T, advantages_T, segments, correction, aggregation, *,
knobs)``: T generated tokens of whole sequences, one after the other; advantages and correction have no gradient. It
returns the ``LossSum`` that ``aggregate`` makes of one value for each token. It is called for a few sequences at a
time, so a token's value may depend on its own sequence and on nothing else. The default of ``aggregation`` is the one
the loss is made for; its knobs are those parameters that settings or ``loss_arguments`` name.

Below, r = pi / anchor is the ratio to the correction's anchor, w its weight, A the advantage, sg stops the gradient.
At r = 1 and w = 1 every policy loss has the gradient of -A log pi.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from staleflow.errors import ConfigError
from staleflow.training.correction import Correction, log_ratio
from staleflow.training.options import ADVANTAGES, LOSSES, TrainerOptions
from staleflow.training.own import SPARED, check_loss
from staleflow.training.packed import SEQUENCE_MEAN, TOKEN_MEAN, Aggregation, LossSum, Segments, aggregate


def ppo_clip(
    logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    correction: Correction,
    aggregation: Aggregation = TOKEN_MEAN,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossSum:
    """PPO: l = -w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A); with dual clip c, at A < 0: l = -w max(that, c A).

    So there is no gradient where r A has been improved beyond the clip, nor at A < 0 where r > c. ``eps_low=1`` and
    ``eps_high=math.inf`` turn a side off.
    """
    advantages_T = _checked(logprobs_T, advantages_T, segments, correction)
    log_ratio_T = log_ratio(logprobs_T, correction.anchor_T)
    return _clipped(log_ratio_T, advantages_T, segments, correction, aggregation, (eps_low, eps_high, dual_clip))


def dapo(
    logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    correction: Correction,
    aggregation: Aggregation = TOKEN_MEAN,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
) -> LossSum:
    """DAPO: PPO with a higher upper clip (so that rare tokens can grow), as a mean over all tokens of the batch.

    Its other two parts concern rewards: the filter ``no-signal`` for dynamic sampling, and ``overlong_penalty``.
    """
    knobs = {"eps_low": eps_low, "eps_high": eps_high, "dual_clip": dual_clip}
    return ppo_clip(logprobs_T, advantages_T, segments, correction, aggregation, **knobs)


def gspo(
    logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    correction: Correction,
    aggregation: Aggregation = SEQUENCE_MEAN,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> LossSum:
    """GSPO: l = -w min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), s_i = exp(1/|o_i| sum_t log r_t) for all of o_i.

    In its token form, s_t = sg(s_i) pi_t / sg(pi_t): the same value, and where A and w are constant in a sequence the
    same gradient, while advantages and weights by token keep their meaning.
    """
    advantages_T = _checked(logprobs_T, advantages_T, segments, correction)
    held_T = logprobs_T.detach()
    mean_T = segments.spread(segments.mean(log_ratio(held_T, correction.anchor_T)))
    log_ratio_T = mean_T + logprobs_T - held_T
    return _clipped(log_ratio_T, advantages_T, segments, correction, aggregation, (eps_low, eps_high, None))


def cispo(
    logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    correction: Correction,
    aggregation: Aggregation = TOKEN_MEAN,
    *,
    eps_low: float = 1.0,
    eps_high: float = 4.0,
) -> LossSum:
    """CISPO: l = -w sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi.

    The weight is clipped and not the gradient: every token keeps one. By default only the upper side is clipped, at 5.
    """
    advantages_T = _checked(logprobs_T, advantages_T, segments, correction)
    log_ratio_T = log_ratio(logprobs_T.detach(), correction.anchor_T)
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    losses_T = -correction.weights_T * clipped_T * advantages_T * logprobs_T
    metrics = _ratio_metrics(log_ratio_T, ratio_T)
    metrics |= {"clip_low": ratio_T < 1 - eps_low, "clip_high": ratio_T > 1 + eps_high}
    return _policy(losses_T, segments, aggregation, correction, metrics, ratio_T)


PolicyLoss = Callable[..., LossSum]


def policy_loss(options: TrainerOptions) -> tuple[PolicyLoss, Aggregation]:
    """The configured loss with its knobs, and how it is aggregated."""
    loss = LOSSES.bound(options.loss, options.clip, options.loss_arguments)
    return LOSSES.held(options.loss, loss, check_loss, SPARED), _aggregation(options, loss)


def _aggregation(options: TrainerOptions, loss: PolicyLoss) -> Aggregation:
    """As configured; ``auto``: the loss's own default unless that is a mean over tokens, else the advantage's."""
    kind = options.aggregation
    if kind == "auto":
        own = inspect.signature(loss).parameters["aggregation"].default
        own = own if isinstance(own, Aggregation) else TOKEN_MEAN
        kind = ADVANTAGES.entry(options.advantage).aggregation if own == TOKEN_MEAN else None
        if kind is None:
            return own
    if kind != "fixed-length":
        return Aggregation(kind)
    if options.max_tokens is None:
        raise ConfigError(f"advantage={options.advantage} divides by the longest response: give max_tokens too")
    return Aggregation(kind, options.max_tokens)


def value_loss(
    values_T: Tensor,
    returns_T: Tensor,
    old_values_T: Tensor,
    segments: Segments,
    aggregation: Aggregation = TOKEN_MEAN,
    keep_N: Tensor | None = None,
    *,
    eps: float = 0.2,
) -> LossSum:
    """PPO's clipped value loss: l = 1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2).

    Metrics ``returns``, ``returns_squared`` and ``value_error_squared`` make up the explained variance of a step.
    """
    segments.check_tokens(values=values_T, returns=returns_T, old_values=old_values_T)
    returns_T, old_T = returns_T.detach().to(values_T), old_values_T.detach().to(values_T)
    error_T = (values_T - returns_T) ** 2
    held_T = (values_T.clamp(old_T - eps, old_T + eps) - returns_T) ** 2
    metrics = {
        "value_clip": held_T > error_T,
        "value_error_squared": error_T,
        "returns": returns_T,
        "returns_squared": returns_T**2,
    }
    return aggregate(0.5 * torch.maximum(error_T, held_T), segments, aggregation, keep_N, metrics)


def kl_loss(
    logprobs_T: Tensor,
    reference_T: Tensor,
    segments: Segments,
    aggregation: Aggregation = TOKEN_MEAN,
    keep_N: Tensor | None = None,
) -> LossSum:
    """l = exp(-d) - 1 + d, with d = log pi - log reference: an estimate of KL(pi || reference) at each token drawn from
    pi that is unbiased and never negative, and has its gradient near the reference."""
    segments.check_tokens(logprobs=logprobs_T, reference=reference_T)
    above_T = log_ratio(logprobs_T, reference_T.detach())
    kl_T = (-above_T).expm1() + above_T
    return aggregate(kl_T, segments, aggregation, keep_N, {"kl_reference": kl_T})


def entropy_bonus(
    entropy_T: Tensor, segments: Segments, aggregation: Aggregation = TOKEN_MEAN, keep_N: Tensor | None = None
) -> LossSum:
    """l = -H: added with a coefficient above 0, it keeps the policy from collapsing."""
    return aggregate(-entropy_T, segments, aggregation, keep_N, {"entropy": entropy_T})


def _clipped(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    correction: Correction,
    aggregation: Aggregation,
    clip: tuple[float, float, float | None],
) -> LossSum:
    """The clipped surrogate of PPO and GSPO, which differ only in the ratio."""
    eps_low, eps_high, dual_clip = clip
    ratio_T = log_ratio_T.exp()
    losses_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high))
    metrics = _ratio_metrics(log_ratio_T, ratio_T) | {
        "clip_low": (ratio_T < 1 - eps_low) & (advantages_T < 0),
        "clip_high": (ratio_T > 1 + eps_high) & (advantages_T > 0),
    }
    if dual_clip is not None:
        losses_T = torch.where(advantages_T < 0, torch.minimum(losses_T, -advantages_T * dual_clip), losses_T)
        metrics["clip_dual"] = (ratio_T > dual_clip) & (advantages_T < 0)
    return _policy(correction.weights_T * losses_T, segments, aggregation, correction, metrics, ratio_T)


def _policy(
    losses_T: Tensor,
    segments: Segments,
    aggregation: Aggregation,
    correction: Correction,
    metrics: dict[str, Tensor],
    ratio_T: Tensor,
) -> LossSum:
    loss = aggregate(losses_T, segments, aggregation, correction.keep_N, metrics, {"ratio_max": ratio_T})
    return replace(loss, metrics=loss.metrics + correction.metrics)


def _ratio_metrics(log_ratio_T: Tensor, ratio_T: Tensor) -> dict[str, Tensor]:
    """``approx_kl`` estimates KL(anchor || pi) by (r - 1) - log r."""
    return {"ratio": ratio_T, "approx_kl": log_ratio_T.expm1() - log_ratio_T}


def _checked(logprobs_T: Tensor, advantages_T: Tensor, segments: Segments, correction: Correction) -> Tensor:
    """The advantages, in the precision of the model and without a gradient."""
    segments.check_tokens(
        logprobs=logprobs_T, advantages=advantages_T, anchor=correction.anchor_T, weights=correction.weights_T
    )
    return advantages_T.detach().to(logprobs_T)
