"""Passes over made-up rows before the first step, so that none has to wait for compilers and recordings."""

from __future__ import annotations

import numpy as np

from staleflow.training.recorded import FEWEST, MOST, SHORTEST
from staleflow.training.trainer import Trainer
from staleflow.types import Row

MEMBERS = 8


def rehearse(trainer: Trainer) -> None:
    """Compute gradients of small passes and of a full one, and forget them: the trainer is then as it was."""
    small = [FEWEST << at for at in range((MOST // FEWEST).bit_length())]
    most = getattr(trainer.model.config, "max_position_embeddings", SHORTEST)
    for longest in sorted({min(SHORTEST, most), min(2 * SHORTEST, most)}):
        for tokens in (*small, trainer.options.micro_tokens):
            trainer.compute([_group(tokens, longest, trainer.version)])
    for tokens in small if trainer.options.share_prompts else ():
        trainer.compute(_alike(tokens, trainer.version))
    trainer.reset()


def _group(tokens: int, longest: int, version: int) -> list[Row]:
    """About this many tokens in rows shorter than ``longest``, every second of which is right. Neighbours have other
    prompts: what rows share would be computed once, and the pass would not be full."""
    first = max(2, min(longest, tokens // 2) - 8)
    other = min(first, max(2, (tokens - first) // (MEMBERS - 1) - 8))
    lengths = [first] + [other] * max(MEMBERS - 1, (tokens - first) // (other + 8))
    return [_row(at, length, version) for at, length in enumerate(lengths)]


def _alike(tokens: int, version: int) -> list[list[Row]]:
    """Groups whose rows share their prompts: no more than this many tokens, and more than half as many."""
    prompt, made = 40, 12
    zeros, groups = np.zeros(made), tokens // (prompt - 1 + MEMBERS * (made + 1))
    return [
        [
            Row.of(f"rehearsal/{at}", np.full(prompt, group % 2), zeros, zeros - 1, [(version, made)], float(at % 2))
            for at in range(MEMBERS)
        ]
        for group in range(groups)
    ]


def _row(at: int, length: int, version: int) -> Row:
    made = length - length // 2
    zeros = np.zeros(made)
    return Row.of(f"rehearsal/{at}", np.full(length // 2, at % 2), zeros, zeros - 1, [(version, made)], float(at % 2))
