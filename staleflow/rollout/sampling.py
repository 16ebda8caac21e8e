"""Drawing tokens: all rows at once, with the same result as one row at a time.

Each row has one uniform number, a hash of the trajectory's seed and the count of tokens it has drawn, and takes the
token at which the cumulative distribution exceeds it. So a sample depends only on its own distribution, seed and
position: not on its neighbours in the batch, nor on where the trajectory was interrupted and resumed.

The log-probability is that of the distribution the token was drawn from: after temperature, truncation and
renormalisation. For greedy rows it is the model's own, at temperature 1. ::

    drawn = draw(logits_NV, params)
    drawn.tokens, drawn.logprobs, drawn.sound
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from staleflow.rollout.rows import Ints, Rows

Uint64s = npt.NDArray[np.uint64]
CANDIDATES = 1024
"""Most likely tokens that top-p tries first: sorting a whole vocabulary costs more than a decoding step."""


class Params(NamedTuple):
    """Columns, one entry per row to draw."""

    seed: Uint64s
    drawn: Ints
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float64]
    top_k: Ints
    min_p: npt.NDArray[np.float32]

    @classmethod
    def of(cls, rows: Rows, order: Ints) -> "Params":
        return cls(
            rows.seed[order],
            rows.drawn[order],
            rows.temperature[order],
            rows.top_p[order],
            rows.top_k[order],
            rows.min_p[order],
        )

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Which rows exclude some tokens."""
        return ((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)) & (self.temperature > 0)


class Drawn(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    sound: list[bool]
    """False: the row's logits were not finite numbers, and its token means nothing."""


def uniform(seed: Uint64s, counter: Ints) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits: two rounds of the SplitMix64 finaliser over seed and counter."""
    with np.errstate(over="ignore"):
        mixed = _mix(seed + np.uint64(0x9E3779B97F4A7C15))
        mixed = _mix(mixed ^ (counter.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: Uint64s) -> Uint64s:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def draw(logits: Tensor, params: Params) -> Drawn:
    """One token per row of ``logits [rows, vocabulary]``, which may be overwritten."""
    logits = logits.float()
    greedy = params.temperature == 0
    if (params.temperature != 1).any():
        logits /= column(np.where(greedy, 1, params.temperature).astype(np.float32), logits)
    probs = torch.softmax(logits, -1)
    truncated = params.truncated
    if truncated.any():
        _truncate(probs, params, np.flatnonzero(truncated))
    if greedy.all():
        tokens, total = probs.argmax(-1), None
    else:
        tokens, total = _inverse(probs, torch.from_numpy(uniform(params.seed, params.drawn)).to(probs.device))
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(probs.device), probs.argmax(-1), tokens)
    chosen = probs.gather(1, tokens[:, None])[:, 0].double()
    # A whole distribution sums to 1 up to rounding, which says nothing about the model: only truncation renormalises.
    if total is not None and truncated.any():
        chosen = torch.where(torch.from_numpy(truncated).to(probs.device), chosen / total, chosen)
    logprobs = chosen.log()
    sound = torch.isfinite(logprobs)
    return Drawn(tokens.tolist(), logprobs.tolist(), sound.tolist())


def column(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _truncate(probs: Tensor, params: Params, rows: Ints) -> None:
    """Set to zero what top-k, top-p and min-p exclude. Each is a least probability, so ties stay together."""
    every = len(rows) == len(probs)
    index = torch.from_numpy(rows).to(probs.device)
    part = probs if every else probs.index_select(0, index)
    least = part.amax(-1, keepdim=True) * column(params.min_p[rows], part)
    if (params.top_k[rows] > 0).any() or (params.top_p[rows] < 1).any():
        least = torch.maximum(least, _nucleus(part, params.top_k[rows], params.top_p[rows]))
    part.masked_fill_(part < least, 0.0)
    if not every:
        probs.index_copy_(0, index, part)


def _nucleus(probs: Tensor, top_k: Ints, top_p: npt.NDArray[np.float64]) -> Tensor:
    """The least probability that top-k, then top-p over what is left, keep in each row."""
    vocabulary = probs.shape[1]
    k = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)
    looked_at = min(vocabulary, max(CANDIDATES, int(k[k < vocabulary].max(initial=0))))
    while True:
        best = probs.topk(looked_at, dim=-1).values.double()
        inside = torch.arange(looked_at, device=probs.device) < column(k, probs)
        cumulated = torch.where(inside, best, 0.0).cumsum(-1)
        whole = torch.where(column(k < vocabulary, probs), cumulated[:, -1:], probs.sum(-1, keepdim=True).double())
        enough = cumulated[:, -1:] >= whole * column(top_p, probs)
        if looked_at == vocabulary or bool((enough | column((top_p == 1) & (k <= looked_at), probs)).all()):
            break
        looked_at = vocabulary
    kept = inside & (cumulated - best < whole * column(top_p, probs))
    least = best.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_min_(0))
    unlimited = column((k == vocabulary) & (top_p == 1), probs)
    return torch.where(unlimited, 0.0, least).float()


def _inverse(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative probability exceeds the uniform number's share of the total, and the total.

    Sums have double precision and two levels, first over blocks of tokens and then inside the block that was hit: a
    running sum over the whole vocabulary would favour some tokens in single precision, and costs more in double.
    """
    vocabulary = probs.shape[1]
    block = next((size for size in (256, 192, 128, 320, 224, 160) if vocabulary % size == 0), 0)
    if not block:
        block = 256
        probs = torch.nn.functional.pad(probs, (0, -vocabulary % block))
    blocks = probs.view(len(probs), -1, block)
    upto = blocks.sum(-1).double().cumsum(-1)
    total = upto[:, -1]
    target = torch.minimum(uniforms * total, total.nextafter(total.new_zeros(()))).nan_to_num_(0.0)[:, None]
    hit = (upto <= target).sum(-1, keepdim=True).clamp_max_(upto.shape[1] - 1)
    before = torch.where(hit > 0, upto.gather(1, (hit - 1).clamp_min(0)), 0.0)
    inner = blocks.gather(1, hit[:, :, None].expand(-1, -1, block))[:, 0].double().cumsum(-1)
    # The block's sum and its running sum are rounded differently: never step past its last possible token.
    rest = torch.minimum(target - before, inner[:, -1:].nextafter(inner.new_zeros(())))
    inside = (inner <= rest).sum(-1, keepdim=True).clamp_max_(block - 1)
    return (hit * block + inside)[:, 0].clamp_max_(vocabulary - 1), total
