"""What of a step is computed, and with which advantages: decided before any gradient, from rewards and known values.

    work = with_advantages(Work(groups), options)           # whole batch or the groups that just arrived
    work = work.only(signals(work))                         # without groups that teach nothing
    for part in work.split(options.updates_per_step): ...   # mini-batches

All of it is a function of its arguments, so that a step gives the same work however it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from staleflow.errors import ConfigError
from staleflow.training.advantages import Gae, final_rewards, gae, overlong_penalty, whiten
from staleflow.training.micro_batches import Known
from staleflow.training.options import ADVANTAGES, TrainerOptions
from staleflow.training.packed import Segments
from staleflow.types import Row

Group = Sequence[Row]


@dataclass(frozen=True)
class Work:
    """Groups, and what is known of their generated tokens, in the same order."""

    groups: Sequence[Group]
    known: Known = field(default_factory=Known)

    @cached_property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group]

    @cached_property
    def tokens(self) -> list[int]:
        """Generated ones of each group."""
        return [sum(row.tokens.size for row in group) for group in self.groups]

    def only(self, keep: Sequence[bool]) -> Work:
        """The groups that are to be kept."""
        if all(keep):
            return self
        kept_T = torch.repeat_interleave(torch.tensor(keep), torch.tensor(self.tokens))
        return Work([group for group, kept in zip(self.groups, keep, strict=True) if kept], self.known.at(kept_T))

    def split(self, parts: int) -> Iterator[Work]:
        """Into runs of groups in their order, of numbers that differ by 1 at most; empty ones are left out."""
        count = len(self.groups)
        ends = [count * (part + 1) // parts for part in range(parts)]
        begin, before = 0, 0
        for end in ends:
            after = before + sum(self.tokens[begin:end])
            if end > begin:
                yield Work(self.groups[begin:end], self.known.at(slice(before, after)))
            begin, before = end, after


def shaped(rewards_N: Tensor, lengths_N: Tensor, options: TrainerOptions) -> Tensor:
    """r_i + the overlong penalty of a response of its length, if there is one."""
    if not options.overlong_buffer:
        return rewards_N
    assert options.max_tokens is not None
    limits = (options.max_tokens, options.overlong_buffer, options.overlong_penalty)
    return rewards_N + overlong_penalty(lengths_N, *limits)


def estimated(rewards_N: Tensor, values_T: Tensor, segments: Segments, options: TrainerOptions) -> Gae:
    """Advantages and returns by GAE, the shaped reward coming with the last token."""
    rewards_T = final_rewards(shaped(rewards_N, segments.lengths_N, options), segments)
    return gae(rewards_T, values_T, segments, options.gamma, options.gae_lambda)


def with_advantages(work: Work, options: TrainerOptions) -> Work:
    """The same work, its advantages known. Those of GAE stay unknown until values are, which a pass gives."""
    if options.has_values and not options.whiten_advantages:
        return work
    rewards_N = torch.tensor([row.reward for row in work.rows], dtype=torch.float64)
    segments = Segments.of([row.tokens.size for row in work.rows])
    if options.has_values:
        assert work.known.values_T is not None
        advantages_T = estimated(rewards_N, work.known.values_T, segments, options).advantages_T
    else:
        advantages_T = _from_rewards(work, shaped(rewards_N, segments.lengths_N, options), segments, options)
    if options.whiten_advantages:
        advantages_T = whiten(advantages_T.double())
    return Work(work.groups, work.known._replace(advantages_T=advantages_T))


def signals(work: Work) -> list[bool]:
    """For each group, whether some advantage is not 0. What is not known may be."""
    if work.known.advantages_T is None:
        return [True] * len(work.groups)
    return [bool((part != 0).any()) for part in work.known.advantages_T.split(work.tokens)]


def _from_rewards(work: Work, rewards_N: Tensor, segments: Segments, options: TrainerOptions) -> Tensor:
    groups_N = torch.tensor([at for at, group in enumerate(work.groups) for _ in group])
    found: Tensor = ADVANTAGES.load(options.advantage)(rewards_N, groups_N, segments, **options.advantage_arguments)
    if found.shape == (segments.sequences,):
        return segments.spread(found)
    if found.shape != (segments.tokens,):
        raise ConfigError(
            f"training.advantage={options.advantage} returned a tensor of shape {tuple(found.shape)}: return one "
            f"number for each of the {segments.sequences} sequences, or of the {segments.tokens} tokens"
        )
    return found
