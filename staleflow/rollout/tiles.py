"""How the tokens of a step with prefill are laid out for a GPU: spans one behind the other, cut into tiles. ::

    spans = Spans.of(starts=[7, 0], lengths=[1, 300], tables=tables_SP, page_size=16)
    tiles = tiled(spans, most_tokens=16)

A span is what a step computes of one sequence: one token where it decodes, a part of its context where it is prefilled.
"""

from typing import NamedTuple

import numpy as np

from staleflow.rollout.rows import Ints


class Spans(NamedTuple):
    starts: Ints
    """Tokens of each span's sequence that come before it."""
    lengths: Ints
    positions: Ints
    """Of each token in its sequence."""
    slots: Ints
    """Of each token: where its KV entries go."""
    pages: Ints
    """Of all contexts, one behind the other."""
    first_pages: Ints
    """Where those of each span begin."""

    @classmethod
    def of(cls, starts: Ints, lengths: Ints, tables: Ints, page_size: int) -> "Spans":
        """``tables [spans, pages]``: the pages of each sequence, filled up with any."""
        held = -(-(starts + lengths) // page_size)
        width = int(held.max(initial=0))
        pages = tables[:, :width][np.arange(width) < held[:, None]]
        first_pages = np.cumsum(held) - held
        owner = np.repeat(np.arange(len(starts)), lengths)
        positions = np.arange(len(owner)) + (starts - np.cumsum(lengths) + lengths)[owner]
        slots = pages[first_pages[owner] + positions // page_size] * page_size + positions % page_size
        return cls(starts, lengths, positions, slots, pages, first_pages)


def tiled(spans: Spans, most_tokens: int) -> Ints:
    """``[4, tiles]``, as ``cuda_kernels.attend_spans`` takes them. Long contexts come first: they take longest."""
    lengths = spans.lengths
    counts = -(-lengths // most_tokens)
    owner = np.repeat(np.arange(len(lengths)), counts)
    before = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * most_tokens
    tokens = np.minimum(most_tokens, lengths[owner] - before)
    starts = spans.starts[owner] + before
    firsts = (np.cumsum(lengths) - lengths)[owner] + before
    order = np.argsort(-(starts + tokens), kind="stable")
    return np.stack((firsts, tokens, starts, spans.first_pages[owner]))[:, order]
