"""Attention inside each row of a packed pass, without a mask over all pairs of tokens of the pass.

    attend_by_rows(model)                                                 # once
    decoder(input_ids=..., position_ids=..., **by_rows(lengths, device))  # rows one behind the other, 1 x L

On CPU each row is a call of its own, which costs least. On a GPU rows of similar lengths are padded for this operation
only, since few large kernels are faster there. A model that is called without ``rows`` attends as transformers does by
``sdpa``.
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

from staleflow.model_json import FAMILIES

NAME = "staleflow-rows"
PADDED = 4


class Rows(NamedTuple):
    lengths: list[int]
    """Of all tokens of each row."""
    padded: tuple[Tensor, Tensor] | None = None
    """Where the tokens of N x M padded rows are in L, and the tokens of L in N * M; None: each row is called alone."""


def attend_by_rows(model: Any) -> bool:
    """Let the model take ``rows``, if its attention is plain and causal; False if it is not.

    Others get transformers' own mask for packed rows."""
    config = model.config
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    windowed = windowed or (config.model_type == "mistral" and config.sliding_window is not None)
    if config.model_type not in FAMILIES or windowed or config.attention_dropout:
        return False
    model.set_attn_implementation(NAME)
    return True


def by_rows(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a model needs to be told about a packed pass."""
    # A mask of four dimensions is passed on as it is: it keeps transformers from making one of L x L.
    no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)
    padded = padding(lengths, device) if device.type != "cpu" and worth_padding(lengths) else None
    return {"rows": Rows(list(lengths), padded), "attention_mask": no_mask}


def worth_padding(lengths: Sequence[int]) -> bool:
    """Whether padded rows would hold no more than ``PADDED`` times the tokens: one long row must not lengthen many."""
    return max(lengths) * len(lengths) <= PADDED * sum(lengths)


def padding(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """See ``Rows.padded``. Places beyond a row's end repeat some token: nothing before them looks there."""
    most, total = max(lengths), sum(lengths)
    lengths_N = torch.tensor(lengths, device=device)
    starts_N = lengths_N.cumsum(0) - lengths_N
    there_NM = (starts_N[:, None] + torch.arange(most, device=device)).clamp(max=total - 1)
    rows_L = torch.repeat_interleave(lengths_N, output_size=total)
    back_L = torch.arange(total, device=device) - starts_N[rows_L] + rows_L * most
    return there_NM, back_L


def attention(
    module: Any,
    query_1HLD: Tensor,
    key_1HLD: Tensor,
    value_1HLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    rows: Rows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: the result is 1 x L x H x D."""
    if rows is None:
        return sdpa_attention_forward(  # pyright: ignore[reportReturnType]
            module, query_1HLD, key_1HLD, value_1HLD, attention_mask, scaling=scaling, **others
        )
    states = (query_1HLD, key_1HLD, value_1HLD)
    how: dict[str, Any] = {"is_causal": True, "scale": scaling, "enable_gqa": query_1HLD.shape[1] != key_1HLD.shape[1]}
    if rows.padded is None:
        parts = zip(*(each.split(rows.lengths, 2) for each in states), strict=True)
        return torch.cat([scaled_dot_product_attention(q, k, v, **how) for q, k, v in parts], 2).transpose(1, 2), None
    there_NM, back_L = rows.padded
    q, k, v = (each[0].transpose(0, 1)[there_NM].transpose(1, 2) for each in states)
    out_NMHD = scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)
    return out_NMHD.flatten(0, 1)[back_L][None], None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
