"""The user's own losses, advantages and corrections, held to what they must return.

    loss = LOSSES.held("my_loss:soft_clip", loss, check_loss, SPARED)     # a built-in is returned as it is

What one of them raises, or returns by mistake, ends the run with one line that names its setting: the next trainer
would fail at the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from staleflow.training.correction import Correction
from staleflow.training.options import ADVANTAGES, CORRECTIONS, LOSSES, Training
from staleflow.training.packed import Aggregation, LossSum, Metrics, Segments

SPARED = (MemoryError, torch.OutOfMemoryError)
"""Not their fault."""


def own_parts(options: Training) -> list[str]:
    """The settings that name functions of the user's own."""
    named = ((ADVANTAGES, options.advantage), (CORRECTIONS, options.correction), (LOSSES, options.loss))
    return [f"{registry.setting}={name}" for registry, name in named if registry.key(name) is None]


def check_loss(
    loss: Any, logprobs_T: Tensor, advantages_T: Tensor, segments: Segments, correction: Correction, kind: Aggregation
) -> None:
    del logprobs_T, advantages_T, segments, correction
    if not isinstance(loss, LossSum):
        raise ValueError(
            f"{_a(loss)}: return what aggregate(losses_T, segments, aggregation, correction.keep_N) returns"
        )
    if loss.aggregation != kind:
        raise ValueError(f"a loss aggregated by {loss.aggregation.kind}: give aggregate the aggregation of the call")
    if loss.total.shape != () or not loss.total.requires_grad:
        shape = f"of shape {tuple(loss.total.shape)}" if loss.total.shape else "without a gradient"
        raise ValueError(f"a loss {shape}: aggregate what was computed from logprobs_T, without detach() or no_grad()")


def check_advantage(found: Any, rewards_N: Tensor, groups_N: Tensor, segments: Segments) -> None:
    del rewards_N, groups_N
    wanted = f"return one number for each of the {segments.sequences} sequences, or of the {segments.tokens} tokens"
    if not isinstance(found, Tensor):
        raise ValueError(f"{_a(found)}: {wanted}, as a tensor")
    if found.shape not in ((segments.sequences,), (segments.tokens,)):
        raise ValueError(f"a tensor of shape {tuple(found.shape)}: {wanted}")
    if not (finite := torch.isfinite(found)).all():
        at = int((~finite).nonzero()[0])
        raise ValueError(f"{float(found[at])} at {at} of {found.numel()}: return finite numbers")


def check_correction(found: Any, proximal_T: Tensor, behaviour_T: Tensor, segments: Segments) -> None:
    del proximal_T, behaviour_T
    if not isinstance(found, Correction):
        raise ValueError(f"{_a(found)}: return Correction(anchor_T, weights_T)")
    for name, value in (("anchor_T", found.anchor_T), ("weights_T", found.weights_T)):
        _check(f"a Correction whose {name}", value, segments.tokens, "token")
    if found.keep_N is not None:
        _check("a Correction whose keep_N", found.keep_N, segments.sequences, "sequence")
        if found.keep_N.dtype != torch.bool:
            raise ValueError(f"a Correction whose keep_N is {found.keep_N.dtype}: give True or False for each sequence")
    if not isinstance(found.metrics, Metrics):
        raise ValueError(f"a Correction whose metrics are {_a(found.metrics)}: give Metrics(...)")


def _check(what: str, value: Any, count: int, of: str) -> None:
    if not isinstance(value, Tensor) or value.shape != (count,):
        seen = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is {_a(value)}"
        raise ValueError(f"{what} {seen}: give one value for each of the {count} {of}s, flat")


def _a(value: Any) -> str:
    return "nothing" if value is None else f"an object of the type {type(value).__name__}"
