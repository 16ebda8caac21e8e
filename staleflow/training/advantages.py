"""Advantages: how much better than expected a sequence, or a token, turned out.

An advantage, built in or the user's own, is ``advantage(rewards_N, groups_N, segments, *, knobs)``: the rewards of N
sequences, overlong penalty included; the number of each one's group (prompt); and which of the T tokens belong to which
sequence. It returns one number for each sequence or for each token. Groups may have any size and come in any order::

    advantages_N = grpo(rewards_N, groups_N, segments)
    advantages_T = segments.spread(advantages_N)
    gae(final_rewards(rewards_N, segments), values_T, segments).advantages_T      # PPO with a value head

The promise: a group without a learning signal (one member, or all rewards equal) has advantages of exactly 0, never
NaN. Advantages of scope ``group`` (``options.Advantage``) depend on their own group only, so they can be computed as
groups arrive; a user's function is given the whole batch unless its attribute ``scope`` says so. GAE is different: it
needs values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from staleflow.training.packed import Segments


class _Groups(NamedTuple):
    """Statistics of each sequence's own group, at each sequence."""

    size_N: Tensor
    mean_N: Tensor
    signal_N: Tensor
    """Whether the group has two different rewards."""
    index_N: Tensor
    groups: int


def grpo(rewards_N: Tensor, groups_N: Tensor, segments: Segments, *, epsilon: float = 1e-6) -> Tensor:  # noqa: ARG001
    """A_i = (r_i - mean(r)) / (std(r) + epsilon), over the group; std with n - 1. 0 without a signal."""
    rewards_N = _checked(rewards_N)
    groups = _group(rewards_N, groups_N)
    centred_N = rewards_N - groups.mean_N
    squares_N = _group_sum(centred_N**2, groups)
    std_N = (squares_N / (groups.size_N - 1).clamp(min=1)).sqrt()
    return torch.where(groups.signal_N, centred_N / (std_N + epsilon), 0)


def dr_grpo(rewards_N: Tensor, groups_N: Tensor, segments: Segments) -> Tensor:  # noqa: ARG001
    """A_i = r_i - mean(r), over the group. Made for the aggregation ``fixed-length``."""
    rewards_N = _checked(rewards_N)
    groups = _group(rewards_N, groups_N)
    return torch.where(groups.signal_N, rewards_N - groups.mean_N, 0)


def rloo(rewards_N: Tensor, groups_N: Tensor, segments: Segments) -> Tensor:  # noqa: ARG001
    """A_i = r_i - mean of the others' rewards = n / (n - 1) * (r_i - mean(r)). 0 for a group of one."""
    rewards_N = _checked(rewards_N)
    groups = _group(rewards_N, groups_N)
    factor_N = groups.size_N / (groups.size_N - 1).clamp(min=1)
    return torch.where(groups.signal_N, factor_N * (rewards_N - groups.mean_N), 0)


def reinforce_plus_plus(
    rewards_N: Tensor,
    groups_N: Tensor,  # noqa: ARG001
    segments: Segments,
    *,
    epsilon: float = 1e-6,
) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon), mean and std over all tokens of the batch; 0 if all r are equal.

    Sequences are weighted by their length. Nothing can be trained before the last reward of the batch is known.
    """
    segments.check_sequences(rewards=rewards_N)
    rewards_N = _checked(rewards_N)
    return whiten(rewards_N, segments.lengths_N.to(rewards_N), epsilon)


def whiten(values: Tensor, weights: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """(x - mean(x)) / (std(x) + epsilon), with weights, over all of the batch; 0 if all are equal."""
    if values.numel() == 0:
        raise ValueError("nothing to whiten: give at least one value")
    weights = torch.ones_like(values) if weights is None else weights
    centred = values - (weights * values).sum() / weights.sum()
    std = ((weights * centred**2).sum() / weights.sum()).sqrt()
    return torch.where(values.max() > values.min(), centred / (std + epsilon), 0)


class Gae(NamedTuple):
    advantages_T: Tensor
    returns_T: Tensor
    """What the value head is trained towards."""


@torch.no_grad()
def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    segments: Segments,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Gae:
    """Generalised advantage estimation, within each sequence.

    delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lam A_{t+1};   return_t = A_t + V_t.
    Beyond the last token V and A are 0.
    """
    segments.check_tokens(rewards=rewards_T, values=values_T)
    _check_finite("reward of token", rewards_T)
    last_N = segments.ends_N - 1
    next_T = values_T.roll(-1)
    next_T[last_N] = 0.0
    advantages_T = rewards_T.to(values_T) + gamma * next_T - values_T
    # The recurrence by doubling: after k rounds each token has the discounted sum of the next 2^k deltas, so the
    # longest sequence takes log2 rounds, not one for each token.
    left_T = segments.spread(last_N) - torch.arange(segments.tokens, device=values_T.device)
    longest, reach = int(segments.lengths_N.max()), 1
    while reach < longest:
        ahead_T = torch.where(left_T >= reach, advantages_T.roll(-reach), 0)
        advantages_T = advantages_T + (gamma * lam) ** reach * ahead_T
        reach *= 2
    return Gae(advantages_T, advantages_T + values_T)


def final_rewards(rewards_N: Tensor, segments: Segments) -> Tensor:
    """Each sequence's reward at its last token, 0 before."""
    segments.check_sequences(rewards=rewards_N)
    rewards_N = rewards_N.to(segments.lengths_N.device)
    return rewards_N.new_zeros(segments.tokens).index_copy(0, segments.ends_N - 1, rewards_N)


def overlong_penalty(lengths_N: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft overlong punishment, to be added to rewards; L is the length.

    0 up to L = max_length - buffer, then falling to -factor at max_length:
    factor * clip((max_length - buffer - L) / buffer, -1, 0).
    """
    return factor * ((max_length - buffer - lengths_N.double()) / buffer).clamp(-1, 0)


def _group(rewards_N: Tensor, groups_N: Tensor) -> _Groups:
    if groups_N.shape != rewards_N.shape:
        raise ValueError(
            f"{groups_N.numel()} group ids for {rewards_N.numel()} rewards: give the group of each sequence, flat"
        )
    names_G, index_N = groups_N.to(rewards_N.device).unique(return_inverse=True)
    count = names_G.numel()
    sizes_G = torch.bincount(index_N, minlength=count)
    sums_G = rewards_N.new_zeros(count).index_add(0, index_N, rewards_N)
    # By the extremes, not by the standard deviation: the mean of equal rewards may differ from them by rounding.
    most_G = rewards_N.new_empty(count).scatter_reduce(0, index_N, rewards_N, "amax", include_self=False)
    least_G = rewards_N.new_empty(count).scatter_reduce(0, index_N, rewards_N, "amin", include_self=False)
    return _Groups(sizes_G[index_N], (sums_G / sizes_G)[index_N], (most_G > least_G)[index_N], index_N, count)


def _group_sum(values_N: Tensor, groups: _Groups) -> Tensor:
    return values_N.new_zeros(groups.groups).index_add(0, groups.index_N, values_N)[groups.index_N]


def _checked(rewards_N: Tensor) -> Tensor:
    if rewards_N.ndim != 1 or rewards_N.numel() == 0:
        raise ValueError(
            f"rewards have shape {tuple(rewards_N.shape)}: the batch is empty or not flat, give one reward per sequence"
        )
    _check_finite("reward of sequence", rewards_N)
    # Rewards are few: double precision costs nothing and makes groups independent of their neighbours' size.
    return rewards_N.double()


def _check_finite(what: str, values: Tensor) -> None:
    if not (finite := torch.isfinite(values)).all():
        at = int((~finite).nonzero()[0])
        raise ValueError(f"the {what} {at} is {float(values[at])}: let the reward function return a finite number")
