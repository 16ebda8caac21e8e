"""Trajectories of a step, packed into forward passes of about a given number of tokens, without padding.

    for batch in micro_batches(rows, most_tokens=1024, known=Known(advantages_T)):
        logprobs_T, entropy_T, values_T = forward(model, batch, temperature=1.0)

A row is never cut, so one that is longer than the budget is a pass of its own. Positions begin at 0 in each row, which
is how transformers' models tell rows apart in one flat sequence. What rows of one prompt have in common may be
computed once for all of them (``pieces.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from staleflow.servers.payloads import pack
from staleflow.training.attention import attends_by_rows, by_rows
from staleflow.training.logprobs import log_probs
from staleflow.training.packed import Segments
from staleflow.training.pieces import Layout, Pieces, Sizes, cuts
from staleflow.types import Row

if TYPE_CHECKING:
    from staleflow.training.decoder import Decoder


class Known(NamedTuple):
    """What is known of generated tokens before their gradient is computed, flat; None: the pass itself will tell."""

    advantages_T: Tensor | None = None
    proximal_T: Tensor | None = None
    """Log-probabilities of the policy with which the step began."""
    values_T: Tensor | None = None
    """What the value head gave when the step began."""
    wholes_T: Tensor | None = None
    """Made tokens of the episode that a token belongs to; None: no episode has more than one branch."""

    def at(self, where: slice | Tensor) -> Known:
        return Known(*(None if each is None else each[where] for each in self))

    def to(self, device: torch.device | None) -> Known:
        return Known(*(None if each is None else moved(each, device) for each in self))


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
    pieces: Pieces
    known: Known


def moved(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor on the device, without waiting for what that computes."""
    if device is None or device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def micro_batches(
    rows: Sequence[Row],
    most_tokens: int,
    device: torch.device | None = None,
    known: Known | None = None,
    *,
    share: bool = False,
) -> Iterator[MicroBatch]:
    """Passes of about equal sizes rather than full ones and a rest: a small pass costs a GPU as much as a large one.

    ``share``: compute once what rows of one prompt have in common, where that is worth it.
    """
    known, sizes = known or Known(), Sizes.of(rows, share)
    begin, before = 0, 0
    for end in cuts(sizes, most_tokens):
        after = before + sum(row.made for row in rows[begin:end])
        yield _batch(rows[begin:end], Layout.of(sizes.part(begin, end)), known.at(slice(before, after)), device)
        begin, before = end, after


def _batch(rows: Sequence[Row], layout: Layout, known: Known, device: torch.device | None) -> MicroBatch:
    packed = pack(rows)
    sizes = np.diff(packed.starts)
    positions = np.arange(packed.tokens.size) - np.repeat(packed.starts[:-1], sizes)
    generated = np.flatnonzero(positions >= np.repeat(packed.prompt_lengths, sizes))
    lengths = sizes - packed.prompt_lengths
    if any(version < 0 for row in rows for version, _ in row.spans):
        generated = generated[np.concatenate([row.made_at for row in rows])]
        lengths = np.array([row.made for row in rows])
    places = np.cumsum(layout.kept) - 1  # in the pass, of tokens that are in it

    def tensor(values: Any) -> Tensor:
        return moved(torch.from_numpy(np.ascontiguousarray(values)), device)

    return MicroBatch(
        tensor(packed.tokens[layout.kept].astype(np.int64)),
        tensor(positions[layout.kept]),
        tensor(places[generated - 1]),
        tensor(packed.tokens[generated].astype(np.int64)),
        tensor(packed.logprobs[generated]),
        Segments(tensor(lengths.astype(np.int64)), generated.size, *_shares(lengths, known, tensor)),
        tensor(packed.rewards),
        layout.pieces(tensor),
        known.to(device),
    )


def _shares(
    lengths: npt.NDArray[Any], known: Known, tensor: Callable[[Any], Tensor]
) -> tuple[Tensor | None, float | None]:
    """Where episodes have several branches: the made tokens of each row's episode, and how many episodes that makes."""
    if known.wholes_T is None:
        return None, None
    wholes = known.wholes_T.numpy()[np.cumsum(lengths) - 1]
    return tensor(wholes), float((lengths / wholes).sum())


class Outputs(NamedTuple):
    logprobs_T: Tensor
    """Log-probabilities of the generated tokens."""
    entropy_T: Tensor
    """Entropies of the distributions they were drawn from."""
    values_T: Tensor | None = None
    """Values of the states before them."""


def forward(
    model: Any,
    batch: MicroBatch,
    temperature: float,
    *,
    train_entropy: bool = False,
    value_head: Callable[[Tensor], Tensor] | None = None,
    half: bool = False,
    decoder: Decoder | None = None,
) -> Outputs:
    """One pass. ``half``: matrix products in bfloat16 on a GPU, by the ``decoder`` if it is given; ``train_entropy``:
    with a gradient of the entropy.

    Only places that predict a generated token go through the output matrix, and probabilities are computed in float32
    at least, after the temperature that the engine drew with: otherwise ratios to its own would mean nothing.
    """
    entropic = train_entropy and torch.is_grad_enabled()
    if decoder is not None:
        hidden_TH = decoder(batch)
        head = (decoder.head.value, decoder.head.trained_gradient)
        found = log_probs(hidden_TH, *head, batch.targets_T, temperature, entropic, decoder.kernels)
        return Outputs(*found, None if value_head is None else value_head(hidden_TH))
    device, output = batch.tokens_L.device, model.get_output_embeddings()
    rows = by_rows(batch.pieces) if attends_by_rows(model) else {}
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        hidden_LH = model.get_decoder()(
            input_ids=batch.tokens_L[None], position_ids=batch.positions_L[None], use_cache=False, **rows
        ).last_hidden_state[0]
        hidden_TH = hidden_LH[batch.predicting_T]
        values_T = None if value_head is None else value_head(hidden_TH)
        if half and device.type == "cuda":
            from staleflow.training import kernels

            if output.weight.dtype == torch.bfloat16:  # gathered so from the ranks, which want its gradient back
                head = (output.weight, None)
            else:
                head = (output.weight.detach().to(torch.bfloat16), _gradient(output.weight))
            found = log_probs(hidden_TH.to(torch.bfloat16), *head, batch.targets_T, temperature, entropic, kernels)
            return Outputs(*found, values_T)
        logits_TV = output(hidden_TH)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    every_TV = torch.log_softmax(logits_TV if temperature == 1 else logits_TV / temperature, -1)
    with torch.set_grad_enabled(entropic):
        entropy_T = -(every_TV.exp() * every_TV).sum(-1)
    logprobs_T = every_TV.gather(1, batch.targets_T[:, None])[:, 0]
    return Outputs(logprobs_T, entropy_T, values_T)


def _gradient(weight: Any) -> Tensor | None:
    """What the gradient of this parameter is added to, if it is trained."""
    if not weight.requires_grad or not torch.is_grad_enabled():
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
