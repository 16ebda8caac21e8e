"""The same mathematics by loops over sequences and plain means: slow, and close to how papers write it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from staleflow.training.packed import Aggregation


def by_sequence(values_T: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return list(values_T.split(list(lengths)))


def group_advantages(kind: str, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    members: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    advantages = [0.0] * len(rewards)
    for rows in members.values():
        mine = [rewards[i] for i in rows]
        if len(set(mine)) == 1:
            continue
        for i in rows:
            others = [rewards[j] for j in rows if j != i]
            advantages[i] = {
                "grpo": (rewards[i] - statistics.fmean(mine)) / (statistics.stdev(mine) + 1e-6),
                "dr_grpo": rewards[i] - statistics.fmean(mine),
                "rloo": rewards[i] - statistics.fmean(others),
            }[kind]
    return advantages


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Of one sequence, from its end."""
    advantages = [0.0] * len(values)
    ahead, after = 0.0, 0.0
    for t in reversed(range(len(values))):
        ahead = rewards[t] + gamma * after - values[t] + gamma * lam * ahead
        advantages[t], after = ahead, values[t]
    return advantages


def mean_loss(losses: Sequence[Tensor], aggregation: Aggregation) -> Tensor:
    """From the token losses of each sequence that is kept."""
    if not losses:
        return torch.zeros((), dtype=torch.float64)
    if aggregation.kind == "token-mean":
        return torch.cat(list(losses)).mean()
    if aggregation.kind == "sequence-mean":
        return torch.stack([each.mean() for each in losses]).mean()
    assert aggregation.length is not None
    return torch.stack([each.sum() / aggregation.length for each in losses]).mean()


def correct(kind: str, proximal: Tensor, behaviour: Tensor, knobs: dict[str, Any]) -> tuple[Tensor, Tensor, bool]:
    """Of one sequence: what the ratio is taken against, the weights, and whether it is kept."""
    weights = (proximal - behaviour).exp().detach()
    if kind == "truncated":
        return (
            proximal.detach(),
            torch.tensor([min(float(w), knobs["importance_cap"]) for w in weights], dtype=weights.dtype),
            True,
        )
    if kind == "decoupled":
        return proximal.detach(), weights, True
    middle = math.prod(float(w) for w in weights) ** (1 / len(weights))
    low, high = knobs["sequence_band"]
    kept = kind == "none" or low <= middle <= high
    return behaviour, torch.ones_like(behaviour), kept


def token_losses(kind: str, logprobs: Tensor, anchor: Tensor, advantages: Tensor, **eps: Any) -> Tensor:
    """Of one sequence, before weights; gradients as the papers define them."""
    ratio = (logprobs - anchor).exp()
    low, high = 1 - eps["eps_low"], 1 + eps["eps_high"]
    if kind == "gspo":
        ratio = (logprobs - anchor).mean().exp().detach() * (logprobs - logprobs.detach()).exp()
    losses = []
    for t in range(len(logprobs)):
        a, r = advantages[t], ratio[t]
        clipped = r if low <= r <= high else torch.tensor(low if r < low else high, dtype=r.dtype)
        if kind == "cispo":
            losses.append(-clipped.detach() * a * logprobs[t])
            continue
        gain = r * a if r * a <= clipped * a else clipped * a
        dual = eps.get("dual_clip")
        if dual is not None and a < 0 and gain < dual * a:
            gain = dual * a + 0 * logprobs[t]
        losses.append(-gain)
    return torch.stack(losses)
