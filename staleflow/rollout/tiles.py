"""How the tokens of a step with prefill are laid out for a GPU: spans one behind the other, cut into tiles. ::

    spans = Spans.of(starts=[7, 0], lengths=[1, 300], tables=tables_SP, page_size=16)
    tiles = tiled(spans, most_tokens=16)

A span is what a step computes of one sequence: one token where it decodes, a part of its context where it is prefilled.
Steps are filled up to a few numbers of tokens, so that a graph serves many of them.
"""

from typing import NamedTuple

import numpy as np

from staleflow.rollout.rows import Ints

LEAST, PREPARED, GRAPHED = 64, 2048, 9216
"""Tokens of the smallest graph, of the largest that is recorded at the start, and of the largest."""
COARSE, ROUND = 1024, 64
"""Steps of more tokens than are prepared, and of more than have a graph, are filled up to a multiple of these."""


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


def tokens_for(count: int) -> int:
    """Tokens that a step of ``count`` is filled up to: of small ones a power of two, or one and a half."""
    if count > PREPARED:
        multiple = COARSE if count <= GRAPHED else ROUND
        return -(-count // multiple) * multiple
    size = max(LEAST, 1 << (count - 1).bit_length())
    return size * 3 // 4 if size > LEAST and count <= size * 3 // 4 else size


def prepared_for(most: int) -> list[int]:
    """The sizes of steps of at most ``most`` tokens whose graphs are recorded at the start."""
    return sorted({tokens_for(count) for count in range(1, min(most, PREPARED) + 1)})


def tiles_for(size: int, spans: int, most_tokens: int) -> int:
    """The most tiles of a step of ``size`` tokens: each of its spans has one that is not full."""
    return -(-min(size, spans + size // most_tokens) // 16) * 16
