"""Passes over made-up rows before the first step, so that none has to wait for compilers and recordings.

Of each size two are recorded, one where prompts are shared and one where they are not. Both have room for rows of 12
tokens on average and 512 at most, so most small passes of a run fit in them. How long its rows will be is not known
yet: recordings that suit them better are made once that pays (``recorded.py``).
"""

from __future__ import annotations

import numpy as np

from staleflow.training.recorded import SHORTEST, SIZES
from staleflow.training.trainer import GroupRows, Trainer
from staleflow.types import Row

MEMBERS = 8
LONGEST = 2 * SHORTEST
SHORT = 20
"""Tokens of most rows."""


def rehearse(trainer: Trainer) -> None:
    """Compute gradients of small passes and of a full one, and forget them: the trainer is then as it was."""
    longest = min(LONGEST, getattr(trainer.model.config, "max_position_embeddings", LONGEST))
    for tokens in SIZES:  # the smallest first: a pass takes a larger recording that is there
        trainer.compute([_mixed(tokens, longest, trainer.version)])
        if trainer.options.share_prompts:
            trainer.compute(_alike(tokens, longest, trainer.version))
    trainer.compute([_group(trainer.options.micro_tokens, longest, trainer.version)])
    trainer.reset()


def _mixed(tokens: int, longest: int, version: int) -> GroupRows:
    """So many tokens, or a few less, in one long row and many short ones, of which neighbours have other prompts: what
    rows share would be computed once."""
    first = min(longest, tokens * 5 // 8)
    lengths = [first] + [SHORT] * ((tokens - first) // SHORT)
    return [_row(at, length, version) for at, length in enumerate(lengths)]


def _alike(tokens: int, longest: int, version: int) -> list[GroupRows]:
    """About as many tokens in rows that share their prompts: one long prompt, and many short ones."""
    made, few = 13, 3
    first, prompt = min(longest - made, tokens * 9 // 16), min(longest - made, 64)
    groups = (tokens - first - few * (made + 1)) // (prompt + MEMBERS * (made + 1))
    sizes = [(first, few)] + [(prompt, MEMBERS)] * groups
    zeros = np.zeros(made)
    return [
        [
            Row.of(f"rehearsal/{at}", np.full(size, group % 2), zeros, zeros - 1, [(version, made)], float(at % 2))
            for at in range(members)
        ]
        for group, (size, members) in enumerate(sizes)
    ]


def _group(tokens: int, longest: int, version: int) -> GroupRows:
    """About this many tokens in rows shorter than ``longest``, every second of which is right, and of which neighbours
    have other prompts."""
    first = max(2, min(longest, tokens // 2) - 8)
    other = min(first, max(2, (tokens - first) // (MEMBERS - 1) - 8))
    lengths = [first] + [other] * max(MEMBERS - 1, (tokens - first) // (other + 8))
    return [_row(at, length, version) for at, length in enumerate(lengths)]


def _row(at: int, length: int, version: int) -> Row:
    made = length - length // 2
    zeros = np.zeros(made)
    return Row.of(f"rehearsal/{at}", np.full(length // 2, at % 2), zeros, zeros - 1, [(version, made)], float(at % 2))
