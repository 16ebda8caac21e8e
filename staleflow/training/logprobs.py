"""Log-probabilities of generated tokens and entropies, without ever holding the logits of all of them.

    logprobs_T, entropy_T = log_probs(hidden_TH, head, targets_T, temperature, train_entropy=False, kernels)

The logits of 16k tokens over 150k words are 9 GiB in float32, and a softmax with its gradient would keep three such.
They are made here for some thousand tokens at a time, used, and made again in backward, where the last ones come first:
those are still there. So there are never more than ``CHUNK`` bytes of them, and a pass that needs no more makes each
once. The products are in the precision of ``hidden`` and ``head``, and the rest is in float32.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 30
"""Bytes of logits at a time."""


def log_probs(
    hidden_TH: Tensor,
    head_VH: Tensor,
    gradient_VH: Tensor | None,
    targets_T: Tensor,
    temperature: float,
    train_entropy: bool,
    kernels: ModuleType,
) -> tuple[Tensor, Tensor]:
    """And entropies. The gradient of ``head`` is added to ``gradient``, if that is given; else it is autograd's."""
    args = (head_VH, gradient_VH, targets_T, temperature, train_entropy, kernels)
    return _LogProbs.apply(hidden_TH, *args)  # pyright: ignore[reportReturnType]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        head_VH: Tensor,
        gradient_VH: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        train_entropy: bool,
        kernels: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        cuts, found = _cuts(hidden_TH, head_VH), list[tuple[Tensor, Tensor, Tensor]]()
        for part, targets in zip(hidden_TH.split(cuts), targets_T.split(cuts), strict=True):
            ctx.last = None  # they are let go before there are others
            ctx.last = part @ head_VH.t()
            found.append(kernels.log_probs(ctx.last, targets, temperature))
        logprobs_T, entropy_T, totals_T = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.save_for_backward(hidden_TH, head_VH, targets_T, entropy_T, totals_T)
        ctx.rest = (gradient_VH, temperature, kernels, cuts)
        ctx.train_entropy = train_entropy
        if not train_entropy:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, d_logprobs_T: Tensor, d_entropy_T: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_TH, head_VH, *by_token = ctx.saved_tensors
        gradient_VH, temperature, kernels, cuts = ctx.rest
        d_hidden_TH = torch.empty_like(hidden_TH)
        if own := ctx.needs_input_grad[1]:
            gradient_VH = torch.zeros_like(head_VH, dtype=torch.promote_types(head_VH.dtype, torch.float32))
        given = (hidden_TH, d_hidden_TH, *by_token, d_logprobs_T.contiguous(), d_entropy_T.contiguous())
        parts = [*zip(*(each.split(cuts) for each in given), strict=True)]
        for hidden, d_hidden, targets, entropy, totals, d_logprobs, d_entropy in reversed(parts):
            logits, ctx.last = hidden @ head_VH.t() if ctx.last is None else ctx.last, None
            d_spread = d_entropy if ctx.train_entropy else None
            kernels.log_probs_backward(logits, targets, entropy, totals, d_logprobs, d_spread, temperature)
            torch.mm(logits, head_VH, out=d_hidden)
            if gradient_VH is not None:
                kernels.accumulate(gradient_VH, logits, hidden)
            del logits
        d_head_VH = gradient_VH.to(head_VH.dtype) if own and gradient_VH is not None else None
        return d_hidden_TH, d_head_VH, None, None, None, None, None


def _cuts(hidden_TH: Tensor, head_VH: Tensor) -> list[int]:
    """Chunks of about equal sizes."""
    tokens = hidden_TH.shape[0]
    count = -(-tokens * head_VH.shape[0] * hidden_TH.element_size() // CHUNK)
    ends = [tokens * (at + 1) // count for at in range(count)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
