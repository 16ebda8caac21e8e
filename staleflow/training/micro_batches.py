"""Trajectories of a step, packed into forward passes of about a given number of tokens, without padding.

    for batch in micro_batches(rows, advantages_N, most_tokens=512):
        logprobs_T, entropy_T = policy(model, batch, temperature=1.0)

A row is never cut, so one that is longer than the budget is a pass of its own. Positions begin at 0 in each row, which
is how transformers' models tell rows apart in one flat sequence.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from staleflow.servers.payloads import Row, pack
from staleflow.training.segments import Segments


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
    advantages_N: Tensor


def micro_batches(
    rows: Sequence[Row], advantages_N: Tensor, most_tokens: int, device: torch.device | None = None
) -> Iterator[MicroBatch]:
    begin, held = 0, 0
    for at, row in enumerate(rows):
        size = row.prompt.size + row.tokens.size
        if held and held + size > most_tokens:
            yield _batch(rows[begin:at], advantages_N[begin:at], device)
            begin, held = at, 0
        held += size
    if held:
        yield _batch(rows[begin:], advantages_N[begin:], device)


def _batch(rows: Sequence[Row], advantages_N: Tensor, device: torch.device | None) -> MicroBatch:
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
        advantages_N.to(device),
    )


def policy(model: Any, batch: MicroBatch, temperature: float, train_entropy: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the generated tokens, and the entropy of their distributions, with a gradient if asked for.

    Only places that predict a generated token go through the output matrix, in float32 at least, after the temperature
    that the engine drew with: otherwise ratios to its log-probabilities would mean nothing.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    hidden_LH = decoder(
        input_ids=batch.tokens_L[None], position_ids=batch.positions_L[None], use_cache=False
    ).last_hidden_state[0]
    logits_TV = head(hidden_LH[batch.predicting_T])
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)) / temperature
    every_TV = torch.log_softmax(logits_TV, -1)
    with torch.set_grad_enabled(train_entropy and torch.is_grad_enabled()):
        entropy_T = -(every_TV.exp() * every_TV).sum(-1)
    return every_TV.gather(1, batch.targets_T[:, None])[:, 0], entropy_T
