"""What a training step computes, and with which advantages: decided before any gradient, from rewards and known values.

    work = with_advantages(StepWork(groups), options)       # the whole batch, or the groups that just arrived
    work = work.only(signals(work))                         # without groups that teach nothing
    for part in work.split(options.updates_per_step): ...   # mini-batches

All functions are pure, so a step gives the same work in whatever pieces it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby

import torch
from torch import Tensor

from staleflow.training.advantages import Gae, final_rewards, gae, overlong_penalty, whiten
from staleflow.training.micro_batches import Known
from staleflow.training.options import ADVANTAGES, TrainerOptions
from staleflow.training.own import SPARED, check_advantage
from staleflow.training.packed import Segments
from staleflow.types import Row

GroupRows = Sequence[Row]
"""The members of one group, as the trainer gets them."""


def episodes_of(group: GroupRows) -> list[list[Row]]:
    """The rows of each episode; one that belongs to none is one of its own."""
    if not any(row.episode for row in group):
        return [[row] for row in group]
    return [list(rows) for _, rows in groupby(group, key=lambda row: row.episode or row.name)]


@dataclass(frozen=True)
class StepWork:
    """Groups, and what is known of their generated tokens, in the same order."""

    groups: Sequence[GroupRows]
    known: Known = field(default_factory=Known)

    @cached_property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group]

    @cached_property
    def tokens(self) -> list[int]:
        """Generated tokens of each group."""
        return [sum(row.made for row in group) for group in self.groups]

    @cached_property
    def episodes(self) -> list[list[Row]]:
        """The rows of each episode, in their order."""
        return [rows for group in self.groups for rows in episodes_of(group)]

    @property
    def branched(self) -> bool:
        return len(self.episodes) < len(self.rows)

    def only(self, keep: Sequence[bool]) -> StepWork:
        """The work for the groups that ``keep`` marks."""
        if all(keep):
            return self
        kept_T = torch.repeat_interleave(torch.tensor(keep), torch.tensor(self.tokens))
        return StepWork([group for group, kept in zip(self.groups, keep, strict=True) if kept], self.known.at(kept_T))

    def split(self, parts: int) -> Iterator[StepWork]:
        """Cut the groups, in their order, into parts whose sizes differ by at most 1; empty parts are left out."""
        count = len(self.groups)
        ends = [count * (part + 1) // parts for part in range(parts)]
        begin, before = 0, 0
        for end in ends:
            after = before + sum(self.tokens[begin:end])
            if end > begin:
                yield StepWork(self.groups[begin:end], self.known.at(slice(before, after)))
            begin, before = end, after


def shaped_rewards(rewards_N: Tensor, lengths_N: Tensor, options: TrainerOptions) -> Tensor:
    """r_i + the overlong penalty for its length, if there is one."""
    if not options.overlong_buffer:
        return rewards_N
    assert options.max_tokens is not None
    limits = (options.max_tokens, options.overlong_buffer, options.overlong_penalty)
    return rewards_N + overlong_penalty(lengths_N, *limits)


def estimate_by_gae(rewards_N: Tensor, values_T: Tensor, segments: Segments, options: TrainerOptions) -> Gae:
    """Advantages and returns by GAE, with the shaped reward at the last token."""
    rewards_T = final_rewards(shaped_rewards(rewards_N, segments.lengths_N, options), segments)
    return gae(rewards_T, values_T, segments, options.gamma, options.gae_lambda)


def with_advantages(work: StepWork, options: TrainerOptions) -> StepWork:
    """The same work with its advantages. Those of GAE stay unknown until a forward pass has given the values."""
    if options.has_values and not options.whiten_advantages:
        return work
    if options.has_values:
        assert work.known.values_T is not None
        rewards_N = torch.tensor([row.reward for row in work.rows], dtype=torch.float64)
        segments = Segments.of([row.made for row in work.rows])
        advantages_T = estimate_by_gae(rewards_N, work.known.values_T, segments, options).advantages_T
    else:
        rewards_N = torch.tensor([rows[0].reward for rows in work.episodes], dtype=torch.float64)
        segments = Segments.of([sum(row.made for row in rows) for rows in work.episodes])
        longest_N = segments.lengths_N
        if work.branched:
            longest_N = torch.tensor([max(row.made for row in rows) for rows in work.episodes])
        rewards_N = shaped_rewards(rewards_N, longest_N, options)
        advantages_T = _from_rewards(work, rewards_N, segments, options)
    if options.whiten_advantages:
        advantages_T = whiten(advantages_T.double())
    return StepWork(work.groups, work.known._replace(advantages_T=advantages_T))


def of_episodes(work: StepWork) -> StepWork:
    """The same work, where each branch weighs as a part of its episode, without rows whose tokens are not trained."""
    if work.branched:
        wholes = [sum(row.made for row in rows) for rows in work.episodes]
        wholes_T = torch.repeat_interleave(torch.tensor(wholes), torch.tensor(wholes))
        work = StepWork(work.groups, work.known._replace(wholes_T=wholes_T))
    if not any(row.masked for row in work.rows):
        return work
    kept_N, lengths_N = ([not row.masked for row in work.rows], [row.made for row in work.rows])
    kept_T = torch.repeat_interleave(torch.tensor(kept_N), torch.tensor(lengths_N))
    return StepWork([[row for row in group if not row.masked] for group in work.groups], work.known.at(kept_T))


def signals(work: StepWork) -> list[bool]:
    """Whether each group has, or may have, an advantage other than 0."""
    if work.known.advantages_T is None:
        return [True] * len(work.groups)
    return [bool((part != 0).any()) for part in work.known.advantages_T.split(work.tokens)]


def _from_rewards(work: StepWork, rewards_N: Tensor, segments: Segments, options: TrainerOptions) -> Tensor:
    groups_N = torch.tensor([at for at, group in enumerate(work.groups) for _ in episodes_of(group)])
    advantage = partial(ADVANTAGES.load(options.advantage), **options.advantage_arguments)
    held = ADVANTAGES.held(options.advantage, advantage, check_advantage, SPARED)
    found: Tensor = held(rewards_N, groups_N, segments)
    return segments.spread(found) if found.shape == (segments.sequences,) else found
