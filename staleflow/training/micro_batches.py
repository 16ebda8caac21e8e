"""Trajectories of a step, packed into forward passes of about a given number of tokens, without padding.

    for batch in micro_batches(rows, most_tokens=1024, known=Known(advantages_T)):
        logprobs_T, entropy_T, values_T = forward(model, batch, temperature=1.0)

A row is never cut, so one that is longer than the budget is a pass of its own. Positions begin at 0 in each row, which
is how transformers' models tell rows apart in one flat sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from staleflow.servers.payloads import pack
from staleflow.training.attention import NAME, by_rows
from staleflow.training.packed import Segments
from staleflow.types import Row


class Known(NamedTuple):
    """What is known of generated tokens before their gradient is computed, flat; None: the pass itself will tell."""

    advantages_T: Tensor | None = None
    proximal_T: Tensor | None = None
    """Log-probabilities of the policy with which the step began."""
    values_T: Tensor | None = None
    """Of the value head with which the step began."""

    def at(self, where: slice | Tensor) -> Known:
        return Known(*(None if each is None else each[where] for each in self))

    def to(self, device: torch.device | None) -> Known:
        return Known(*(None if each is None else each.to(device) for each in self))


class MicroBatch(NamedTuple):
    """Suffixes: L all tokens, T generated ones, N rows."""

    tokens_L: Tensor
    positions_L: Tensor
    predicting_T: Tensor
    """Where in L the logits of each generated token come from: one place before it."""
    targets_T: Tensor
    behaviour_T: Tensor
    """Log-probabilities that the engine drew them with."""
    segments: Segments
    rewards_N: Tensor
    lengths: list[int]
    """Of all tokens of each row."""
    known: Known


def micro_batches(
    rows: Sequence[Row], most_tokens: int, device: torch.device | None = None, known: Known | None = None
) -> Iterator[MicroBatch]:
    known = known or Known()
    begin, held, before, generated = 0, 0, 0, 0
    for at, row in enumerate(rows):
        size = row.prompt.size + row.tokens.size
        if held and held + size > most_tokens:
            yield _batch(rows[begin:at], known.at(slice(before, generated)), device)
            begin, held, before = at, 0, generated
        held += size
        generated += row.tokens.size
    if held:
        yield _batch(rows[begin:], known.at(slice(before, generated)), device)


def _batch(rows: Sequence[Row], known: Known, device: torch.device | None) -> MicroBatch:
    packed = pack(rows)
    sizes = np.diff(packed.starts)
    positions = np.arange(packed.tokens.size) - np.repeat(packed.starts[:-1], sizes)
    generated = np.flatnonzero(positions >= np.repeat(packed.prompt_lengths, sizes))

    def tensor(values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return MicroBatch(
        tensor(packed.tokens.astype(np.int64)),
        tensor(positions),
        tensor(generated - 1),
        tensor(packed.tokens[generated].astype(np.int64)),
        tensor(packed.logprobs[generated]),
        Segments.of((sizes - packed.prompt_lengths).tolist(), device),
        tensor(packed.rewards),
        sizes.tolist(),
        known.to(device),
    )


class Outputs(NamedTuple):
    logprobs_T: Tensor
    """Of the generated tokens."""
    entropy_T: Tensor
    """Of the distributions they were drawn from."""
    values_T: Tensor | None = None
    """Of the states before them."""


def forward(
    model: Any,
    batch: MicroBatch,
    temperature: float,
    *,
    train_entropy: bool = False,
    value_head: Callable[[Tensor], Tensor] | None = None,
    half: bool = False,
) -> Outputs:
    """One pass. ``half``: matrix products in bfloat16; ``train_entropy``: with a gradient of the entropy.

    Only places that predict a generated token go through the output matrix, and probabilities are computed in float32
    at least, after the temperature that the engine drew with: otherwise ratios to its own would mean nothing.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    device = batch.tokens_L.device
    rows = by_rows(batch.lengths, device) if model.config._attn_implementation == NAME else {}
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        hidden_LH = decoder(
            input_ids=batch.tokens_L[None], position_ids=batch.positions_L[None], use_cache=False, **rows
        ).last_hidden_state[0]
        hidden_TH = hidden_LH[batch.predicting_T]
        logits_TV = head(hidden_TH)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    every_TV = torch.log_softmax(logits_TV if temperature == 1 else logits_TV / temperature, -1)
    with torch.set_grad_enabled(train_entropy and torch.is_grad_enabled()):
        entropy_T = -(every_TV.exp() * every_TV).sum(-1)
    logprobs_T = every_TV.gather(1, batch.targets_T[:, None])[:, 0]
    return Outputs(logprobs_T, entropy_T, None if value_head is None else value_head(hidden_TH))
