"""The kernels of the trainer in plain torch: what those for a GPU must compute, in any precision and on any device."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from staleflow.training.pieces import Pieces

PROGRAMS = 3


def add_norm(residual: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, kind: torch.dtype) -> Any:
    if branch is not None:
        residual += branch
    scales = (residual.square().mean(-1) + epsilon).rsqrt()
    scaled = residual * scales[:, None]
    return (scaled * weight).to(kind), scaled.to(kind), scales


def norm_backward(
    d_normed: Tensor, scaled: Tensor, scales: Tensor, weight: Tensor, d_residual: Tensor | None, parts: Tensor
) -> Any:
    kind, wide = scaled.dtype, weight.dtype
    d_normed, scaled = d_normed.to(wide), scaled.to(wide)
    parts.zero_()
    parts[0] = (d_normed * scaled).sum(0)
    d_scaled = d_normed * weight
    found = (d_scaled - scaled * (d_scaled * scaled).mean(-1, keepdim=True)) * scales[:, None]
    d_residual = found if d_residual is None else d_residual.add_(found)
    return d_residual, d_residual.to(kind), (scaled * weight).to(kind)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, turned: int) -> None:
    low, high = qkv[:, :turned].to(cos.dtype).chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    qkv[:, :turned] = torch.cat((low * c - high * s, high * c + low * s), -1).to(qkv.dtype)


def rotate_back(d_query: Tensor, d_key: Tensor, d_value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    found = torch.cat((d_query, d_key, d_value), 1)
    rotate(found, cos, -sin, found.shape[1] - d_value.shape[1])
    return found


def swiglu(both: Tensor) -> Tensor:
    gate, up = both.float().chunk(2, -1) if both.dtype == torch.bfloat16 else both.chunk(2, -1)
    return (silu(gate) * up).to(both.dtype)


def swiglu_backward(both: Tensor, d_out: Tensor) -> None:
    with torch.enable_grad():
        leaf = both.clone().requires_grad_()
        out = swiglu(leaf)
        (found,) = torch.autograd.grad(out, leaf, d_out)
    both.copy_(found)
    d_out.copy_(out.detach())


def attend(qkv: Tensor, queries: int, pieces: Pieces, scale: float) -> tuple[Tensor, Any]:
    """By a mask over all pairs of keys and queries, from what a kernel is given."""
    return _attended(_seen(qkv, queries, pieces), pieces, scale), None


def _seen(qkv: Tensor, queries: int, pieces: Pieces) -> list[Tensor]:
    keys = (qkv.shape[1] - queries) // 2
    query, key, value = qkv.transpose(0, 1).split([queries, keys, keys])
    if pieces.context is not None:
        key, value = key[:, pieces.context.where_K], value[:, pieces.context.where_K]
    return [query, key, value]


def _attended(seen: list[Tensor], pieces: Pieces, scale: float) -> Tensor:
    query, key, value = seen
    starts_Q, starts_K, most_Q, most_K = pieces.reach
    found = int(starts_Q.diff().max()), int(starts_K.diff().max())
    if pieces.lengths:
        assert starts_Q.diff().tolist() == pieces.lengths
        assert found == (most_Q, most_K)
    else:  # of a recording: it is made for more
        assert found <= (most_Q, most_K)
    sees = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
    for of_queries, of_keys in zip(pairwise(starts_Q.tolist()), pairwise(starts_K.tolist()), strict=True):
        part = sees[slice(*of_queries), slice(*of_keys)]
        part |= torch.ones_like(part).tril(part.shape[1] - part.shape[0])
    found = scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale, enable_gqa=True)
    return found.transpose(0, 1).contiguous()


def attend_backward(d_out: Tensor, qkv: Tensor, out: Tensor, _: Any, pieces: Pieces, scale: float) -> Any:
    """A kernel leaves the gradients of keys that nobody sees as they were in memory."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in _seen(qkv, out.shape[1], pieces)]
        again = _attended(leaves, pieces, scale)
        found = torch.autograd.grad(again, leaves, d_out)
    d_query, *rest = (each.transpose(0, 1).contiguous() for each in found)
    if (context := pieces.context) is not None:
        for each in rest:
            each[int(context.starts_N[-1]) :] = torch.nan
        rest = [context.back(each, len(qkv)) for each in rest]
    return d_query, *rest


def _log_p(logits: Tensor, temperature: float) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide) / temperature).log_softmax(-1)


def log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Any:
    log_p = _log_p(logits, temperature)
    totals = (logits.to(log_p.dtype) / temperature).logsumexp(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), totals


def log_probs_backward(
    logits: Tensor, targets: Tensor, entropies: Tensor, totals: Tensor, d_logprobs: Tensor, d_entropies: Any,
    temperature: float,
) -> None:  # fmt: skip
    log_p = logits.to(totals.dtype) / temperature - totals[:, None]
    p = log_p.exp()
    found = -p * d_logprobs[:, None]
    found[torch.arange(len(targets)), targets] += d_logprobs
    if d_entropies is not None:
        found -= d_entropies[:, None] * p * (log_p + entropies[:, None])
    logits.copy_(found / temperature)


def accumulate(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    gradient += left.t().to(gradient.dtype) @ right.to(gradient.dtype)
