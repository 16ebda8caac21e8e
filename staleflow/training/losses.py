"""Token-level objectives, as sums that a trainer can stream.

Each loss takes current log-probabilities, advantages and a correction, all flat, and gives a ``LossSum``: the sum that
gradients come from, its counts, and metrics that add up over chunks::

    loss = dapo(logprobs_T, advantages_T, segments, truncated(logprobs_T, behaviour_T))
    loss = loss.plus(kl_loss(logprobs_T, reference_T, segments, loss.aggregation), 0.01)
    loss.total.backward()                       # then scale_gradients(..., step.scale), see segments.py

Below, r = pi / anchor is the ratio to the correction's anchor, w its weight, A the advantage, sg stops the gradient.
At r = 1 and w = 1 every policy loss has the gradient of -A log pi. ``streamable`` says what needs the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from staleflow.training.advantages import ADVANTAGES
from staleflow.training.correction import Correction, log_ratio
from staleflow.training.packed import SEQUENCE_MEAN, TOKEN_MEAN, Aggregation, LossSum, Segments, aggregate

Estimator = Literal["k1", "k2", "k3"]


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
    _check_eps(eps_low, eps_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip}: use a ratio above 1, such as 3, or None")
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
    """DAPO: PPO with the clip higher above (so that rare tokens can grow), as a mean over all tokens of the batch.

    Its other two parts are about rewards: ``no_signal`` for dynamic sampling and ``overlong_penalty``.
    """
    if aggregation != TOKEN_MEAN:
        raise ValueError(f"DAPO with {aggregation.kind}: it is a mean over tokens, use token-mean or the ppo loss")
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
    _check_eps(eps_low, eps_high)
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

    The weight is clipped and not the gradient: every token keeps one. By default only the upper side is, at 5.
    """
    _check_eps(eps_low, eps_high)
    advantages_T = _checked(logprobs_T, advantages_T, segments, correction)
    log_ratio_T = log_ratio(logprobs_T.detach(), correction.anchor_T)
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    losses_T = -correction.weights_T * clipped_T * advantages_T * logprobs_T
    metrics = _ratio_metrics(log_ratio_T, ratio_T)
    metrics |= {"clip_low": ratio_T < 1 - eps_low, "clip_high": ratio_T > 1 + eps_high}
    return _policy(losses_T, segments, aggregation, correction, metrics, ratio_T)


PolicyLoss = Callable[..., LossSum]
POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo": ppo_clip, "dapo": dapo, "gspo": gspo, "cispo": cispo}
DUAL_CLIPPED = ("ppo", "dapo")
"""Those that take ``dual_clip``."""


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
    if not eps >= 0:
        raise ValueError(f"eps={eps}: the clip of values must be 0 or more, math.inf turns it off")
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


def kl_to_reference(logprobs_T: Tensor, reference_T: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Estimates KL(pi || reference) at each token drawn from pi, with d = log pi - log reference.

    k1 = d (unbiased, may be negative);   k2 = d^2 / 2;   k3 = exp(-d) - 1 + d (unbiased, never negative).
    """
    _check_estimator(estimator)
    if logprobs_T.shape != reference_T.shape:
        raise ValueError(
            f"{logprobs_T.numel()} log-probabilities and {reference_T.numel()} of the reference: give one per token"
        )
    above_T = log_ratio(logprobs_T, reference_T.detach())
    if estimator == "k1":
        return above_T
    return above_T**2 / 2 if estimator == "k2" else (-above_T).expm1() + above_T


def kl_loss(
    logprobs_T: Tensor,
    reference_T: Tensor,
    segments: Segments,
    aggregation: Aggregation = TOKEN_MEAN,
    keep_N: Tensor | None = None,
    estimator: Estimator = "k3",
) -> LossSum:
    """l = the estimate of KL(pi || reference). On tokens of pi, k2 has the KL's gradient, k3 near the reference."""
    if estimator == "k1":
        raise ValueError("k1 has an expected gradient of 0 as a loss: use k2 or k3, or subtract k1 from the rewards")
    kl_T = kl_to_reference(logprobs_T, reference_T, estimator)
    return aggregate(kl_T, segments, aggregation, keep_N, {"kl_reference": kl_T})


def token_entropy(logits_TV: Tensor) -> Tensor:
    """H_t = -sum_v p_v log p_v; a logit of -inf has no part in it, nor in the gradient."""
    log_p_TV = logits_TV.log_softmax(-1)
    return -(log_p_TV.exp() * log_p_TV.masked_fill(logits_TV == -math.inf, 0)).sum(-1)


def entropy_bonus(
    entropy_T: Tensor, segments: Segments, aggregation: Aggregation = TOKEN_MEAN, keep_N: Tensor | None = None
) -> LossSum:
    """l = -H: added with a coefficient above 0, it keeps the policy from collapsing."""
    return aggregate(-entropy_T, segments, aggregation, keep_N, {"entropy": entropy_T})


def streamable(advantage: str, loss: str, *, whitened: bool = False, updates: int = 1) -> str | None:
    """Why a step cannot be accumulated group by group and still equal the whole batch; None if it can.

    ``whitened``: advantages are whitened over the batch. ``updates``: optimiser updates per step.
    """
    for kind, name, known in (("advantage", advantage, ADVANTAGES), ("loss", loss, tuple(POLICY_LOSSES))):
        if name not in known:
            raise ValueError(f"{kind} {name!r} is unknown: use one of {', '.join(known)}")
    if updates < 1:
        raise ValueError(f"updates={updates}: a step makes at least 1 update")
    if advantage == "reinforce++" or whitened:
        return f"{advantage} advantages are whitened over the batch: no gradient is known before the last reward"
    if updates > 1:
        return f"a step of {updates} updates draws mini-batches from the whole batch: it streams with 1 update only"
    return None


def _clipped(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    correction: Correction,
    aggregation: Aggregation,
    clip: tuple[float, float, float | None],
) -> LossSum:
    """The clipped surrogate of PPO and GSPO, which differ in the ratio only."""
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


def _check_eps(eps_low: float, eps_high: float) -> None:
    if not 0 <= eps_low <= 1:
        raise ValueError(f"eps_low={eps_low}: use 0 to 1, where 1 turns the lower clip off")
    if not eps_high >= 0:
        raise ValueError(f"eps_high={eps_high}: use 0 or more, where math.inf turns the upper clip off")


def _check_estimator(estimator: str) -> None:
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"estimator {estimator!r} is unknown: use k1, k2 or k3")
