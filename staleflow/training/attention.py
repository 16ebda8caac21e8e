"""Attention inside each row of a packed pass, without a mask over all pairs of tokens of the pass.

    attend_by_rows(model)                                                 # once
    decoder(input_ids=..., position_ids=..., **by_rows(lengths, starts_N))  # rows one behind the other, 1 x L

In bfloat16 on a GPU all rows are one call, whatever their lengths; elsewhere each row is a call of its own, which is
cheapest on a CPU. A model that is called without ``rows`` attends as transformers does by ``sdpa``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from staleflow.model_json import FAMILIES, windowed

NAME = "staleflow-rows"
HEAD = 8
"""The size of a head must be a multiple of this for one call over all rows."""


class PackedRows(NamedTuple):
    lengths: list[int]
    """Tokens of each row, prompt included."""
    starts_N: Tensor
    """Where each row begins, and the end of the last, in 32 bits."""


def attend_by_rows(model: Any) -> None:
    """Let the model take ``rows``, if its attention is plain and causal.

    Others get transformers' own mask for packed rows."""
    config = model.config
    if config.model_type in FAMILIES and not windowed(config) and not config.attention_dropout:
        model.set_attn_implementation(NAME)


def attends_by_rows(model: Any) -> bool:
    return model.config._attn_implementation == NAME


def by_rows(lengths: Sequence[int], starts_N: Tensor) -> dict[str, Any]:
    """The arguments that describe a packed pass to a model: its rows, and no mask."""
    # A mask of four dimensions is passed on as it is: it keeps transformers from making one of L x L.
    no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=starts_N.device)
    return {"rows": PackedRows(list(lengths), starts_N), "attention_mask": no_mask}


def attention(
    module: Any,
    query_1HLD: Tensor,
    key_1HLD: Tensor,
    value_1HLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    rows: PackedRows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: the result is 1 x L x H x D."""
    if rows is None:
        return sdpa_attention_forward(  # pyright: ignore[reportReturnType]
            module, query_1HLD, key_1HLD, value_1HLD, attention_mask, scaling=scaling, **others
        )
    states = (query_1HLD, key_1HLD, value_1HLD)
    how: dict[str, Any] = {"is_causal": True, "scale": scaling, "enable_gqa": query_1HLD.shape[1] != key_1HLD.shape[1]}
    if query_1HLD.is_cuda and torch.is_autocast_enabled("cuda") and query_1HLD.shape[-1] % HEAD == 0:
        q, k, v = (each[0].transpose(0, 1).to(torch.bfloat16) for each in states)
        where = (rows.starts_N, rows.starts_N, max(rows.lengths), max(rows.lengths))
        return torch.ops.aten._flash_attention_forward(q, k, v, *where, 0.0, True, False, scale=scaling)[0][None], None
    parts = zip(*(each.split(rows.lengths, 2) for each in states), strict=True)
    return torch.cat([scaled_dot_product_attention(q, k, v, **how) for q, k, v in parts], 2).transpose(1, 2), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
