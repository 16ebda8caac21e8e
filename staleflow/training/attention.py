"""Attention inside each piece of a packed pass, without a mask over all pairs of tokens of the pass.

    attend_by_rows(model)                                          # once
    decoder(input_ids=..., position_ids=..., **by_rows(pieces))    # one behind the other, 1 x L (pieces.py)

In bfloat16 on a GPU all pieces are one call, whatever their lengths; elsewhere each is a call of its own, which is
cheapest on a CPU. A model that is called without ``pieces`` attends as transformers does by ``sdpa``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from staleflow.model_json import FAMILIES, windowed
from staleflow.training.pieces import Layout, Pieces, Sizes

NAME = "staleflow-rows"
HEAD = 8
"""The size of a head must be a multiple of this for one call over all pieces."""
KEPT = 8
"""Keys for each token of a pass: where its pieces see more than that, each layer gathers them again for the gradients
and does not keep them. Many short responses to a long prompt would take several times the memory of their tokens."""
ALIGNED = 16
"""Numbers of which a row of a mask must be a multiple."""
FLASH_NEAR = 0.05
"""What bfloat16 makes of values around 1."""


def attend_by_rows(model: Any) -> None:
    """Let the model take ``pieces``, if its attention is plain and causal.

    Others get transformers' own mask for packed rows."""
    config = model.config
    if config.model_type in FAMILIES and not windowed(config) and not config.attention_dropout:
        model.set_attn_implementation(NAME)


def attends_by_rows(model: Any) -> bool:
    return model.config._attn_implementation == NAME


def by_rows(pieces: Pieces) -> dict[str, Any]:
    """The arguments that describe a packed pass to a model: its pieces, and no mask."""
    # A mask of four dimensions is passed on as it is: it keeps transformers from making one of L x L.
    no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=pieces.starts_N.device)
    return {"pieces": pieces, "attention_mask": no_mask}


def attention(
    module: Any,
    query_1HLD: Tensor,
    key_1HLD: Tensor,
    value_1HLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    pieces: Pieces | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: the result is 1 x L x H x D."""
    if pieces is None:
        return sdpa_attention_forward(  # pyright: ignore[reportReturnType]
            module, query_1HLD, key_1HLD, value_1HLD, attention_mask, scaling=scaling, **others
        )
    states = (query_1HLD, key_1HLD, value_1HLD)
    if pieces.context is None or pieces.context.where_K.numel() <= KEPT * query_1HLD.shape[2]:
        return _attended(states, pieces, scaling), None
    return checkpoint(_attended, states, pieces, scaling, use_reentrant=False, preserve_rng_state=False), None


def _attended(states: tuple[Tensor, Tensor, Tensor], pieces: Pieces, scaling: float | None) -> Tensor:
    query, key, _ = states
    if query.is_cuda and torch.is_autocast_enabled("cuda") and query.shape[-1] % HEAD == 0:
        q, k, v = (each[0].transpose(0, 1).to(torch.bfloat16) for each in states)
        if (context := pieces.context) is not None:
            # In float32, so that the gradients of a key that several see are not summed in bfloat16.
            k, v = (each.float().index_select(0, context.where_K).to(torch.bfloat16) for each in (k, v))
        found = torch.ops.aten._flash_attention_forward(q, k, v, *pieces.reach, 0.0, True, False, scale=scaling)
        return found[0][None]
    how: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    return _one_by_one(states, pieces, how).transpose(1, 2)


def flash_shares(device: torch.device) -> bool:
    """Whether the call over all pieces lets the last query of each see its last key, as those that see others need.

    PyTorch does not promise it: if it were the first query that sees the first key, gradients would be silently wrong.
    """
    layout, random = Layout.of(Sizes([5, 7, 4], [0, 2, 0])), torch.Generator().manual_seed(0)
    states = [torch.randn(1, 2, 14, 64, generator=random).bfloat16().float() for _ in range(4)]
    found: list[list[Tensor]] = []
    for where in (torch.device("cpu"), device):
        query, key, value, d_out = (each.to(where).requires_grad_() for each in states)
        pieces = layout.pieces(lambda values, where=where: torch.from_numpy(values).to(where))
        with torch.enable_grad(), torch.autocast("cuda", torch.bfloat16, enabled=where.type == "cuda"):
            out, _ = attention(None, query, key, value, None, pieces=pieces)
        gradients = torch.autograd.grad(out.float(), (query, key, value), d_out.detach().transpose(1, 2))
        found.append([each.detach().cpu().float() for each in (out, *gradients)])
    return all(torch.allclose(*each, atol=FLASH_NEAR) for each in zip(*found, strict=True))


def _one_by_one(states: tuple[Tensor, Tensor, Tensor], pieces: Pieces, how: dict[str, Any]) -> Tensor:
    """1 x H x L x D, by a call for each piece."""
    query, key, value = states
    before, counts = [0] * len(pieces.lengths), pieces.lengths
    if (context := pieces.context) is not None:
        before, counts = context.before, [own + seen for own, seen in zip(pieces.lengths, context.before, strict=True)]
        key, value = (each.index_select(2, context.where_K) for each in (key, value))
    masks = _masks(query, pieces.lengths, before)
    parts = zip(query.split(pieces.lengths, 2), key.split(counts, 2), value.split(counts, 2), before, strict=True)
    return torch.cat([_one(*part, masks, how) for part in parts], 2)


def _masks(query: Tensor, lengths: list[int], before: list[int]) -> dict[int, Tensor]:
    """By the tokens that pieces see before their own: a mask for the longest of them, of which others take a corner.

    Those are numbers and not truth values, of which each call would make numbers of its own and keep them. On a GPU
    rows of a mask must be ``ALIGNED``."""
    longest: dict[int, int] = {}
    for own, seen in zip(lengths, before, strict=True):
        if seen:
            longest[seen] = max(own, longest.get(seen, 0))
    wide = {seen: -(-(seen + own) // ALIGNED) * ALIGNED for seen, own in longest.items()}
    return {seen: query.new_full((own, wide[seen]), -torch.inf).triu_(seen + 1) for seen, own in longest.items()}


def _one(
    query: Tensor, key: Tensor, value: Tensor, before: int, masks: dict[int, Tensor], how: dict[str, Any]
) -> Tensor:
    if not before:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **how)
    mask = masks[before][: query.shape[2], : key.shape[2]]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, **how)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
