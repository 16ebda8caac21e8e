"""Triton kernels of the trainer: the small steps between two matrix products, and their gradients.

A GPU reaches its peak in the products alone; what lies between them costs as many bytes as it reads and writes. So each
of these is one kernel, computes in float32, and works in place where nothing is needed twice. ``decoder.py`` and
``logprobs.py`` say what they are for; shapes are theirs: L tokens of a pass, H hidden, T generated ones, V vocabulary.
"""

# Triton's language is not typed, a kernel's pointers are not tensors, and where it is installed its own types
# are those of the inside of a kernel.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from staleflow.training.pieces import Pieces

PROGRAMS = 264
"""Of a sum over rows: enough to keep a large GPU busy, few enough that their parts are summed in no time."""
GATED, VOCABULARY = 1024, 4096
"""Columns that a program looks at together."""


@triton.jit
def _add_norm(residual, branch, weight, normed, scaled, scales, epsilon, size, block: tl.constexpr, adds: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    here = column < size
    at = row.to(tl.int64) * size + column
    x = tl.load(residual + at, mask=here, other=0.0)
    if adds:
        x += tl.load(branch + at, mask=here, other=0.0).to(tl.float32)
        tl.store(residual + at, x, mask=here)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    x *= scale
    kind = normed.dtype.element_ty
    tl.store(scaled + at, x.to(kind), mask=here)
    tl.store(normed + at, (x * tl.load(weight + column, mask=here, other=0.0)).to(kind), mask=here)
    tl.store(scales + row, scale)


@triton.jit
def _norm_backward(
    d_normed, scaled, scales, weight, d_residual, d_half, normed, parts, rows, size,
    block: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, block)
    here = column < size
    w = tl.load(weight + column, mask=here, other=0.0)
    part = tl.zeros([block], tl.float32)
    kind = normed.dtype.element_ty
    for row in range(program, rows, tl.num_programs(0)):
        at = row * size.to(tl.int64) + column
        dy = tl.load(d_normed + at, mask=here, other=0.0).to(tl.float32)
        x = tl.load(scaled + at, mask=here, other=0.0).to(tl.float32)
        part += dy * x
        tl.store(normed + at, (x * w).to(kind), mask=here)
        dy *= w
        dx = (dy - x * (tl.sum(dy * x, 0) / size)) * tl.load(scales + row)
        if adds:
            dx += tl.load(d_residual + at, mask=here, other=0.0)
        tl.store(d_residual + at, dx, mask=here)
        tl.store(d_half + at, dx.to(kind), mask=here)
    tl.store(parts + program * size + column, part, mask=here)


@triton.jit
def _rotate(qkv, cos, sin, stride, turned, half, heads: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0)
    head = tl.arange(0, heads)[:, None]
    column = tl.arange(0, block)[None, :]
    here = (head < turned) & (column < half)
    at = qkv + row.to(tl.int64) * stride + head * 2 * half + column
    low = tl.load(at, mask=here, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + column, mask=column < half, other=0.0)
    s = tl.load(sin + row * half + column, mask=column < half, other=0.0)
    tl.store(at, (low * c - high * s).to(qkv.dtype.element_ty), mask=here)
    tl.store(at + half, (high * c + low * s).to(qkv.dtype.element_ty), mask=here)


@triton.jit
def _rotate_back(
    d_query, d_key, d_value, cos, sin, d_qkv, queries, keys, half, heads: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, heads)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = column < half
    size = 2 * half
    q, k = head < queries, (head >= queries) & (head < queries + keys)
    v = (head >= queries + keys) & (head < queries + 2 * keys)
    from_q = d_query + (row * queries + head) * size + column
    from_k = d_key + (row * keys + head - queries) * size + column
    from_v = d_value + (row * keys + head - queries - keys) * size + column
    low = tl.load(from_q, mask=q & inside, other=0.0).to(tl.float32)
    low += tl.load(from_k, mask=k & inside, other=0.0).to(tl.float32)
    low += tl.load(from_v, mask=v & inside, other=0.0).to(tl.float32)
    high = tl.load(from_q + half, mask=q & inside, other=0.0).to(tl.float32)
    high += tl.load(from_k + half, mask=k & inside, other=0.0).to(tl.float32)
    high += tl.load(from_v + half, mask=v & inside, other=0.0).to(tl.float32)
    c = tl.where(v, 1.0, tl.load(cos + row * half + column, mask=inside, other=0.0))
    s = tl.where(v, 0.0, tl.load(sin + row * half + column, mask=inside, other=0.0))
    at = d_qkv + (row * (queries + 2 * keys) + head) * size + column
    here = (q | k | v) & inside
    tl.store(at, (low * c + high * s).to(d_qkv.dtype.element_ty), mask=here)
    tl.store(at + half, (high * c - low * s).to(d_qkv.dtype.element_ty), mask=here)


@triton.jit
def _swiglu(both, out, wide, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < wide
    at = both + row * 2 * wide + column
    gate = tl.load(at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(at + wide, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * wide + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward(both, d_out, wide, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < wide
    at = both + row * 2 * wide + column
    to = d_out + row * wide + column
    kind = both.dtype.element_ty
    gate = tl.load(at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(at + wide, mask=here, other=0.0).to(tl.float32)
    d = tl.load(to, mask=here, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(to, (silu * up).to(kind), mask=here)
    tl.store(at, (d * up * (share + silu * (1 - share))).to(kind), mask=here)
    tl.store(at + wide, (d * silu).to(kind), mask=here)


@triton.jit
def _log_probs(logits, targets, logprobs, entropies, totals, cooling, vocabulary, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    begin = logits + row.to(tl.int64) * vocabulary
    best = tl.full([block], float("-inf"), tl.float32)
    mass = tl.zeros([block], tl.float32)
    moment = tl.zeros([block], tl.float32)
    for first in range(0, vocabulary, block):
        here = first + column < vocabulary
        x = tl.load(begin + first + column, mask=here, other=float("-inf")).to(tl.float32) * cooling
        higher = tl.maximum(best, x)
        shrink = tl.where(best == float("-inf"), 0.0, tl.exp(best - higher))
        weight = tl.where(x == float("-inf"), 0.0, tl.exp(x - higher))
        mass = mass * shrink + weight
        moment = moment * shrink + tl.where(here, weight * x, 0.0)
        best = higher
    highest = tl.max(best, 0)
    shrink = tl.where(best == float("-inf"), 0.0, tl.exp(best - highest))
    sum_ = tl.sum(mass * shrink, 0)
    total = highest + tl.log(sum_)
    target = tl.load(begin + tl.load(targets + row)).to(tl.float32) * cooling
    tl.store(logprobs + row, target - total)
    tl.store(entropies + row, total - tl.sum(moment * shrink, 0) / sum_)
    tl.store(totals + row, total)


@triton.jit
def _log_probs_backward(
    logits, targets, entropies, totals, d_logprobs, d_entropies, cooling, vocabulary,
    block: tl.constexpr, entropic: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < vocabulary
    at = logits + row.to(tl.int64) * vocabulary + column
    above = tl.load(at, mask=here, other=0.0).to(tl.float32) * cooling - tl.load(totals + row)
    p = tl.exp(above)
    found = tl.load(d_logprobs + row) * (tl.where(column == tl.load(targets + row), 1.0, 0.0) - p)
    if entropic:
        found -= tl.load(d_entropies + row) * p * (above + tl.load(entropies + row))
    tl.store(at, (found * cooling).to(logits.dtype.element_ty), mask=here)


def add_norm(
    residual_LH: Tensor, branch_LH: Tensor | None, weight_H: Tensor, epsilon: float, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``residual += branch`` in place; its norm times the weight, before the weight, and what it was scaled by."""
    rows, size = residual_LH.shape
    normed, scaled = (torch.empty_like(residual_LH, dtype=kind) for _ in range(2))
    scales = residual_LH.new_empty(rows)
    _add_norm[(rows,)](
        residual_LH, residual_LH if branch_LH is None else branch_LH, weight_H, normed, scaled, scales, epsilon, size,
        block=triton.next_power_of_2(size), adds=branch_LH is not None, num_warps=4,
    )  # fmt: skip
    return normed, scaled, scales


def norm_backward(
    d_normed_LH: Tensor,
    scaled_LH: Tensor,
    scales_L: Tensor,
    weight_H: Tensor,
    d_residual_LH: Tensor | None,
    parts_PH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds to ``d_residual`` in place (None: begins it). Returns it, the same in the precision of the pass, and the
    norm's output once more. ``parts`` becomes the gradient of the weight, yet to be summed."""
    rows, size = scaled_LH.shape
    adds = d_residual_LH is not None
    d_residual = d_residual_LH if adds else torch.empty_like(scaled_LH, dtype=torch.float32)
    d_half, normed = torch.empty_like(scaled_LH), torch.empty_like(scaled_LH)
    _norm_backward[(parts_PH.shape[0],)](
        d_normed_LH, scaled_LH, scales_L, weight_H, d_residual, d_half, normed, parts_PH, rows, size,
        block=triton.next_power_of_2(size), adds=adds, num_warps=8,
    )  # fmt: skip
    return d_residual, d_half, normed


def rotate(qkv_LND: Tensor, cos_LD: Tensor, sin_LD: Tensor, turned: int) -> None:
    """Turn the first heads by the angle of their position, in place. Cosine and sine are of half a head."""
    rows, _, size = qkv_LND.shape
    heads, block = triton.next_power_of_2(turned), triton.next_power_of_2(size // 2)
    _rotate[(rows,)](qkv_LND, cos_LD, sin_LD, qkv_LND.stride(0), turned, size // 2, heads=heads, block=block)


def rotate_back(d_query_LND: Tensor, d_key_LND: Tensor, d_value_LND: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """The gradient of ``rotate``, of all heads in one tensor."""
    (rows, queries, size), keys = d_query_LND.shape, d_key_LND.shape[1]
    every = queries + 2 * keys
    found = d_query_LND.new_empty(rows, every, size)
    _rotate_back[(rows,)](
        d_query_LND, d_key_LND, d_value_LND, cos_LD, sin_LD, found, queries, keys, size // 2,
        heads=triton.next_power_of_2(every), block=triton.next_power_of_2(size // 2),
    )  # fmt: skip
    return found


def swiglu(both_LF: Tensor) -> Tensor:
    """``silu(first half) * second half``."""
    rows, wide = both_LF.shape[0], both_LF.shape[1] // 2
    out = both_LF.new_empty(rows, wide)
    _swiglu[(rows, triton.cdiv(wide, GATED))](both_LF, out, wide, block=GATED)
    return out


def swiglu_backward(both_LF: Tensor, d_out_LF: Tensor) -> None:
    """In place: ``both`` becomes its gradient, and ``d_out`` what ``swiglu`` gave."""
    rows, wide = d_out_LF.shape
    _swiglu_backward[(rows, triton.cdiv(wide, GATED))](both_LF, d_out_LF, wide, block=GATED)


def attend(qkv_LND: Tensor, queries: int, pieces: Pieces, scale: float) -> tuple[Tensor, Any]:
    """Causal attention inside each piece and to what it sees before itself; and what its gradient needs besides."""
    query, key, value = _seen(qkv_LND, queries, pieces)
    out, *kept = torch.ops.aten._flash_attention_forward(
        query, key, value, *pieces.reach, 0.0, True, False, scale=scale
    )
    return out, kept[:3]


def attend_backward(
    d_out_LND: Tensor, qkv_LND: Tensor, out_LND: Tensor, kept: Any, pieces: Pieces, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    sums, *random = kept
    query, key, value = _seen(qkv_LND, out_LND.shape[1], pieces)
    d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
        d_out_LND, query, key, value, out_LND, sums, *pieces.reach, 0.0, True, *random, scale=scale
    )
    if (context := pieces.context) is None:
        return d_query, d_key, d_value
    tokens = qkv_LND.shape[0]
    return d_query, context.back(d_key, tokens), context.back(d_value, tokens)


def _seen(qkv_LND: Tensor, queries: int, pieces: Pieces) -> tuple[Tensor, ...]:
    """Queries, keys and values; a key as often as there are pieces that see it."""
    keys = (qkv_LND.shape[1] - queries) // 2
    if (context := pieces.context) is None:
        return qkv_LND.split([queries, keys, keys], 1)
    return qkv_LND[:, :queries], *qkv_LND[:, queries:].index_select(0, context.where_K).split([keys, keys], 1)


def log_probs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the targets; the entropy of each distribution; and the logarithm of the sum of its weights."""
    rows, vocabulary = logits_TV.shape
    logprobs, entropies, totals = torch.empty(3, rows, dtype=torch.float32, device=logits_TV.device)
    _log_probs[(rows,)](
        logits_TV, targets_T, logprobs, entropies, totals, 1 / temperature, vocabulary, block=VOCABULARY, num_warps=8
    )
    return logprobs, entropies, totals


def log_probs_backward(
    logits_TV: Tensor,
    targets_T: Tensor,
    entropies_T: Tensor,
    totals_T: Tensor,
    d_logprobs_T: Tensor,
    d_entropies_T: Tensor | None,
    temperature: float,
) -> None:
    """In place: logits become their gradient."""
    rows, vocabulary = logits_TV.shape
    _log_probs_backward[(rows, triton.cdiv(vocabulary, VOCABULARY))](
        logits_TV, targets_T, entropies_T, totals_T, d_logprobs_T,
        totals_T if d_entropies_T is None else d_entropies_T, 1 / temperature, vocabulary,
        block=VOCABULARY, entropic=d_entropies_T is not None, num_warps=8,
    )  # fmt: skip


def accumulate(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    """``gradient += left^T right`` of what came in lower precision, summed and kept in float32."""
    torch.addmm(gradient, left.t(), right, out_dtype=torch.float32, out=gradient)  # pyright: ignore[reportCallIssue]
