"""Small passes as CUDA graphs: two launches instead of some thousand, which would take longer than the work itself.

    recording = recordings.find(batch)            # None: the pass is too large for one
    hidden_TH = recording.forward(batch)
    recording.backward(d_hidden_TH)

A recording has room for so many tokens and rows, and keys if prompts are shared. What a batch leaves free is padded
with rows that nothing reads: they have no gradient, so they add exactly 0. Recordings share their memory, so the
backward of a pass must end before the next pass begins.

A pass takes the cheapest recording that it fits in. Making one stops a run for some 0.3 s, so one is made only where a
pass fits in none, or where passes have lost about as much by taking a larger one; and never more than ``MOST_MADE``.
Beyond that, what fits in none is not recorded.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from staleflow.errors import line_of
from staleflow.training.decoder import Decoder, Places
from staleflow.training.micro_batches import MicroBatch, moved
from staleflow.training.pieces import SPARE, Context, Pieces

SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096)
"""Tokens of recordings. Above, the GPU's work takes longer than the launches."""
SHORTEST = 256
"""Least tokens that a recording allows its longest row."""
TOKENS_OF_A_ROW = (64, 12, 4)
"""A recording has room for rows of so many tokens on average: attention is launched for all that there is room for."""
SEEN = 2
"""Least keys for each token where prompts are shared."""
KEPT = 3 << 29
"""Most bytes that a recording may keep from forward to backward."""
MOST_MADE = 40
"""Recordings of one trainer."""

# What passes cost, in tokens: about what an H200 needs with 135M and 0.5B.
BLOCK = 128
"""Tokens of a row that attention computes together. It looks at as many blocks of each row as the longest may have, and
that costs as much as a token, whether there is anything in it or not."""
KEYS_FOR_A_TOKEN = 16
"""Keys that cost as much as a token."""
MAKING = 1 << 16
"""What making a recording costs."""


class Room(NamedTuple):
    """What a recording is made for."""

    tokens: int
    rows: int
    longest: int
    """Most of a piece."""
    keys: int = 0
    """Of all pieces, where some see others before themselves; 0: each sees nothing but itself."""
    reach: int = 0
    """Most of a piece."""

    @classmethod
    def of(cls, pieces: Pieces) -> Room | None:
        """The smallest that holds them; None: they are too many."""
        used = sum(pieces.lengths)
        tokens = next((size for size in SIZES if size >= used), None)
        if tokens is None:
            return None
        longest, keys, reach = min(tokens, power_of_two(pieces.longest, SHORTEST)), 0, 0
        if (context := pieces.context) is not None:
            seen = context.where_K.numel() + tokens - used
            keys = tokens * rounded(-(-seen // tokens), SEEN)
            reach = min(tokens, power_of_two(context.longest, longest))
        rooms = (cls(tokens, tokens // average, longest, keys, reach) for average in TOKENS_OF_A_ROW)
        return next((room for room in rooms if room.holds(pieces)), None)

    @property
    def cost(self) -> int:
        """Of a pass, in tokens."""
        blocks = self.rows * (self.longest + max(self.longest, self.reach)) // (2 * BLOCK)
        return self.tokens + blocks + self.keys // KEYS_FOR_A_TOKEN

    def holds(self, pieces: Pieces) -> bool:
        """Whether they fit, and their padding with them."""
        rest = self.tokens - sum(pieces.lengths)
        if pieces.longest > self.longest or padding(rest, self.rows - len(pieces.lengths), self.longest) is None:
            return False
        if (context := pieces.context) is None:
            return not self.keys
        return context.where_K.numel() + rest <= self.keys and context.longest <= self.reach


class Recordings:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._pool = None
        self._made: dict[Room, Recording] = {}
        self._lost = Counter[Room]()
        """What passes have cost more than in a recording of this room."""
        self._shares = True
        """Whether passes that share prompts can be recorded here."""

    @property
    def most(self) -> int:
        """Tokens of the largest pass that can be recorded; 0: none can."""
        return max((size for size in SIZES if size * self._decoder.kept_bytes <= KEPT), default=0)

    def find(self, batch: MicroBatch) -> Recording | None:
        """A recording that the batch fits in, made now if that is worth it; None if there is none."""
        room = Room.of(batch.pieces)
        if room is None or room.tokens > self.most or (room.keys and not self._shares):
            return None
        fitting = min(
            (each for each in self._made if each.holds(batch.pieces)), key=lambda each: each.cost, default=None
        )
        if self._pays(room, fitting):
            return self._make(room)
        return None if fitting is None else self._made[fitting]

    def _pays(self, room: Room, fitting: Room | None) -> bool:
        """Whether to make a recording of this room, where another would do, or none."""
        if room in self._made or len(self._made) >= MOST_MADE:
            return False
        if fitting is None:
            return True
        self._lost[room] += fitting.cost - room.cost
        return self._lost[room] >= MAKING

    def _make(self, room: Room) -> Recording | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            self._made[room] = Recording(self._decoder, room, self._pool)
        except RuntimeError as error:
            if not room.keys:
                raise
            self._shares = False
            warnings.warn(f"passes that share prompts cannot be recorded here: {line_of(error)}", stacklevel=2)
            return None
        return self._made[room]


class Recording:
    def __init__(self, decoder: Decoder, room: Room, pool: object) -> None:
        device = decoder.embedding.value.device
        self._places, tokens = blank(room, device), room.tokens
        self._d_hidden = torch.zeros(tokens, decoder.embedding.value.shape[1], dtype=decoder.kind, device=device)
        for _ in range(2):  # the first passes compile and allocate; without a gradient they add 0
            decoder.backward(self._places, decoder.forward(self._places, keep=True)[1], self._d_hidden)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        how = {"pool": pool, "capture_error_mode": "thread_local"}  # other threads copy meanwhile
        with torch.no_grad():
            with torch.cuda.graph(self._forward, **how):
                self._hidden, kept = decoder.forward(self._places, keep=True)
            with torch.cuda.graph(self._backward, **how):
                decoder.backward(self._places, kept, self._d_hidden)

    def forward(self, batch: MicroBatch) -> Tensor:
        fill(self._places, batch)
        self._forward.replay()
        return self._hidden[: batch.predicting_T.numel()]

    def backward(self, d_hidden_TH: Tensor) -> None:
        generated = d_hidden_TH.shape[0]
        self._d_hidden[:generated].copy_(d_hidden_TH)
        self._d_hidden[generated:].zero_()
        self._backward.replay()


def blank(room: Room, device: torch.device) -> Places:
    """What a recording reads, before anything is in it: padding alone."""

    def zeros(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)

    begins = starts([], room.tokens, room.rows, room.longest)
    assert begins is not None
    starts_N, context = moved(torch.from_numpy(begins), device), None
    if room.keys:
        context = Context([], zeros(room.keys), zeros(room.keys) + room.tokens, starts_N.clone(), room.reach)
    pieces = Pieces([], starts_N, room.longest, context)
    return Places(zeros(room.tokens), zeros(room.tokens), zeros(room.tokens), pieces)


def fill(places: Places, batch: MicroBatch) -> None:
    """Put the batch where a recording reads it, and padding behind it."""
    size, used, generated = places.tokens_L.numel(), batch.tokens_L.numel(), batch.predicting_T.numel()
    places.tokens_L[:used].copy_(batch.tokens_L)
    places.positions_L[:used].copy_(batch.positions_L)
    places.predicting_T[:generated].copy_(batch.predicting_T)
    places.predicting_T[generated:].fill_(size - 1)  # the last token predicts none
    own, given = places.pieces, batch.pieces
    begins = starts(given.lengths, size, own.starts_N.numel() - 1, own.longest)
    assert begins is not None
    device = places.tokens_L.device
    own.starts_N.copy_(moved(torch.from_numpy(begins), device))
    if own.context is not None and given.context is not None:
        before = np.zeros(len(begins), np.int32)  # what the pieces so far see of others
        before[1 : len(given.lengths) + 1] = given.context.before
        own.context.starts_N.copy_(moved(torch.from_numpy(begins + before.cumsum(dtype=np.int32)), device))
        where_K, back_K, seen = own.context.where_K, own.context.back_K, given.context.where_K.numel()
        where_K[:seen].copy_(given.context.where_K)
        where_K[seen:].zero_()  # padding may see anything, and nobody sees what is behind that
        back_K[:seen].copy_(given.context.where_K)
        torch.arange(len(back_K) - seen, out=back_K[seen:])
        back_K[seen:].remainder_(SPARE).add_(size)


def starts(lengths: list[int], tokens: int, rows: int, longest: int) -> np.ndarray | None:
    """Where each row begins, the given rows first, then padding up to ``tokens``, then empty ones; None if they do not
    fit."""
    padded = padding(tokens - sum(lengths), rows - len(lengths), longest)
    if padded is None:
        return None
    found = np.full(rows + 1, tokens, np.int32)
    found[: len(lengths) + len(padded) + 1] = np.cumsum([0, *lengths, *padded])
    return found


def padding(tokens: int, rows: int, longest: int) -> list[int] | None:
    """So many tokens in at most so many rows, each a block of attention if it can be; None if they do not fit."""
    if not 0 <= tokens <= rows * longest:
        return None
    size = max(min(BLOCK, longest), -(-tokens // max(rows, 1)))
    return [min(size, tokens - at) for at in range(0, tokens, size)]


def power_of_two(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


def rounded(count: int, least: int) -> int:
    """Up to a power of two, or to one and a half times one."""
    high = power_of_two(count, least)
    return high * 3 // 4 if high * 3 // 4 >= max(count, least) else high
