"""How the rows of a pass lie one behind the other, so that what they begin with in common is computed once.

The responses of a group begin with the same prompt. All its tokens but the last are a *piece* of their own, followed by
one piece for each response, which begins with the last token of the prompt and sees the common piece before itself.
Nothing that is computed for a prompt depends on what follows it, so outputs and gradients are those of whole rows::

    | prompt of a b c | a | b | c | prompt of d e | d | e | f whole |

    sizes = Sizes.of(rows)                                # what each row adds to a pass
    for end in cuts(sizes, most_tokens): ...              # where to cut them into passes
    for mine in shared_out(rows, ranks, pairs, True): ... # or, before that, which rows are whose
    layout = Layout.of(sizes.part(begin, end))            # of the rows of one
    pieces = layout.pieces(torch.from_numpy)              # what attention has to know
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from staleflow.types import Row

WORTH = 8
"""Rows share their prompt where that leaves out at least one in so many of their tokens: a piece more costs time."""
SPARE = 64
"""Rows for gradients of keys that are only there to fill a pass up: one alone would have to take them in turn."""
Ints = npt.NDArray[np.int64]


class Sizes(NamedTuple):
    """Of rows, in their order."""

    tokens: list[int]
    shared: list[int]
    """Of these, those that the row before has, too, and that are computed once if both are in one pass."""

    @classmethod
    def of(cls, rows: Sequence[Row], share: bool = True) -> Sizes:
        tokens, shared = [row.prompt.size + row.tokens.size for row in rows], [0] * len(rows)
        for begin, end in _alike(rows) if share and rows else ():
            common = rows[begin].prompt.size - 1
            if WORTH * common * (end - begin - 1) >= sum(tokens[begin:end]):
                shared[begin + 1 : end] = [common] * (end - begin - 1)
        return cls(tokens, shared)

    def part(self, begin: int, end: int) -> Sizes:
        """Those of a pass: its first row finds nothing before itself."""
        return Sizes(self.tokens[begin:end], [0, *self.shared[begin + 1 : end]])

    @property
    def total(self) -> int:
        """Tokens of all of them in one pass."""
        return sum(self.tokens) - sum(self.shared)

    @property
    def families(self) -> list[range]:
        """Rows that share a prompt, and others alone."""
        begins = [at for at, shared in enumerate(self.shared) if not shared]
        return [range(*each) for each in pairwise([*begins, len(self.tokens)])]

    def cost(self, pairs: float) -> float:
        """Of computing all of them, in tokens; so many pairs of a query and a key that it sees cost as much as one."""
        seen = sum(tokens**2 - shared**2 for tokens, shared in zip(*self, strict=True)) / 2
        return self.total + seen / pairs


def _alike(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """Where rows with the same prompt begin and end."""
    begins = [at for at, (one, other) in enumerate(pairwise(rows), 1) if one.prompt_bytes != other.prompt_bytes]
    return pairwise([0, *begins, len(rows)])


def cuts(sizes: Sizes, most: int) -> Iterator[int]:
    """Where to cut rows, in their order, into as few passes of at most ``most`` tokens as possible."""
    passes = len([*_filled(sizes, most)])
    low, high = 1, most
    while low < high:  # the least that each could hold
        middle = (low + high) // 2
        low, high = (low, middle) if len([*_filled(sizes, middle)]) <= passes else (middle + 1, high)
    yield from _filled(sizes, low)


def _filled(sizes: Sizes, most: int) -> Iterator[int]:
    held = 0
    for at, (size, shared) in enumerate(zip(*sizes, strict=True)):
        if held and held + size - shared > most:
            yield at
            held = 0
        held += size - shared if held else size
    if held:
        yield len(sizes.tokens)


def shared_out(rows: Sequence[Row], ranks: int, pairs: float, share: bool) -> list[list[int]]:
    """Which rows are computed by which rank, in their order, so that the one with most has little.

    Rows that share a prompt stay together if that is better: there may be fewer prompts than ranks. ``pairs``: as in
    ``Sizes.cost``."""
    sizes, alone = Sizes.of(rows, share), Sizes.of(rows, share=False)

    def given(families: list[range], costs: list[float]) -> list[list[int]]:
        return [[row for at in mine for row in families[at]] for mine in shares(costs, ranks)]

    def most(found: list[list[int]]) -> float:
        return max(Sizes.of([rows[at] for at in mine], share).cost(pairs) for mine in found)

    together = given(sizes.families, [sizes.part(each.start, each.stop).cost(pairs) for each in sizes.families])
    apart = given(alone.families, [alone.part(at, at + 1).cost(pairs) for at in range(len(rows))])
    return min(together, apart, key=most)


def shares(costs: Sequence[float], size: int) -> list[list[int]]:
    """Which of these go to which rank, in their order: the largest first, each to the rank with the least so far."""
    held = [(0.0, rank) for rank in range(size)]
    found: list[list[int]] = [[] for _ in range(size)]
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        cost, rank = heapq.heappop(held)
        found[rank].append(at)
        heapq.heappush(held, (cost + costs[at], rank))
    return [sorted(each) for each in found]


class Context(NamedTuple):
    """Where some pieces see others before themselves: whose keys each attends to."""

    before: list[int]
    """Tokens that each piece sees before its own."""
    where_K: Tensor
    """Where in the pass the keys of all pieces lie."""
    back_K: Tensor
    """Where in the pass their gradients are added, or behind its end: in one of ``SPARE`` rows that nobody reads."""
    starts_N: Tensor
    """Where in K those of each piece begin, and the end of the last, in 32 bits."""
    longest: int
    """Most keys of a piece."""

    def back(self, gradient_K: Tensor, tokens: int) -> Tensor:
        """The gradient of keys or values, by the tokens of the pass that they are of: summed in float32 at least."""
        kind = torch.promote_types(gradient_K.dtype, torch.float32)
        zeros = gradient_K.new_zeros(tokens + SPARE, *gradient_K.shape[1:], dtype=kind)
        return zeros.index_add(0, self.back_K, gradient_K.to(kind))[:tokens]


class Pieces(NamedTuple):
    """What attention has to know of a pass."""

    lengths: list[int]
    starts_N: Tensor
    """Where each begins in the pass, and the end of the last, in 32 bits."""
    longest: int
    context: Context | None = None
    """None: each sees nothing but itself."""

    @property
    def reach(self) -> tuple[Tensor, Tensor, int, int]:
        """Where queries and keys of each piece begin, and the most of each. A piece's last query sees its last key."""
        if self.context is None:
            return self.starts_N, self.starts_N, self.longest, self.longest
        return self.starts_N, self.context.starts_N, self.longest, self.context.longest


class Layout(NamedTuple):
    """Of the rows of a pass, by numbers of the host."""

    kept: npt.NDArray[np.bool_]
    """Which of their tokens are in the pass."""
    lengths: Ints
    """Of the pieces."""
    before: Ints
    begins: Ints

    @classmethod
    def of(cls, sizes: Sizes) -> Layout:
        tokens, shared = (np.array(each, np.int64) for each in sizes)
        first = np.roll(shared, -1) * (shared == 0)  # of a row that others share with: their common piece
        kept = np.arange(tokens.sum()) - np.repeat(np.cumsum(tokens) - tokens, tokens) >= np.repeat(shared, tokens)
        # a common piece (there may be none of it), then the row's own
        lengths = np.stack((first, tokens - shared - first), 1).ravel()
        starts = np.cumsum(lengths) - lengths
        leads = np.maximum.accumulate(np.where(shared == 0, np.arange(len(tokens)), 0))
        before = np.stack((np.zeros_like(first), shared + first), 1).ravel()
        begins = np.stack((starts[::2], starts[::2][leads]), 1).ravel()
        there = lengths > 0
        return cls(kept, lengths[there], before[there], begins[there])

    def pieces(self, tensor: Any) -> Pieces:
        """``tensor``: puts an array on the device."""
        ends = np.cumsum(self.lengths)
        starts_N = tensor(np.concatenate(([0], ends)).astype(np.int32))
        longest = int(self.lengths.max())
        if not self.before.any():
            return Pieces(self.lengths.tolist(), starts_N, longest)
        counts = np.stack((self.before, self.lengths), 1).ravel()
        firsts = np.stack((self.begins, ends - self.lengths), 1).ravel()
        where = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        seen = self.before + self.lengths
        starts_of_keys = tensor(np.concatenate(([0], np.cumsum(seen))).astype(np.int32))
        where_K = tensor(where)
        context = Context(self.before.tolist(), where_K, where_K, starts_of_keys, int(seen.max()))
        return Pieces(self.lengths.tolist(), starts_N, longest, context)
