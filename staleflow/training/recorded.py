"""Small passes as CUDA graphs: two launches instead of some thousand, which would take longer than the work itself.

    recording = recordings.find(batch)            # None: the pass is too large for one
    hidden_TH = recording.forward(batch)
    recording.backward(d_hidden_TH)

A recording is made for a power of two of tokens, and for another of keys if prompts are shared. A smaller batch is
padded with rows that nothing reads: they have no gradient, so they add exactly 0. Recordings share their memory, so the
backward of a pass must end before the next pass begins.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from staleflow.errors import line_of
from staleflow.training.decoder import Decoder, Places
from staleflow.training.micro_batches import MicroBatch, moved
from staleflow.training.pieces import SPARE, Context, Pieces

FEWEST, MOST = 512, 4096
"""Tokens of a recording. Above, the GPU's work takes longer than the launches."""
SHORTEST = 256
"""Least tokens that a recording allows its longest row."""
SEEN = 4
"""Least keys for each token where prompts are shared."""
KEPT = 3 << 29
"""Most bytes that a recording may keep from forward to backward."""
TOKENS_OF_A_ROW = 4
"""A recording has room for rows of this many tokens on average."""


class Room(NamedTuple):
    """What a recording is made for."""

    tokens: int
    longest: int
    """Most of a piece."""
    keys: int = 0
    """Of all pieces, where some see others before themselves; 0: each sees nothing but itself."""
    reach: int = 0
    """Most of a piece."""

    @classmethod
    def of(cls, pieces: Pieces) -> Room:
        used = sum(pieces.lengths)
        tokens, longest = power_of_two(used, FEWEST), power_of_two(pieces.longest, SHORTEST)
        if (context := pieces.context) is None:
            return cls(tokens, longest)
        keys = power_of_two(context.where_K.numel() + tokens - used, SEEN * tokens)
        return cls(tokens, longest, keys, power_of_two(context.longest, longest))


class Recordings:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._pool = None
        self._made: dict[Room, Recording] = {}
        self._shares = True
        """Whether passes that share prompts can be recorded here."""

    @property
    def most(self) -> int:
        """Tokens of the largest pass that can be recorded; 0: none can."""
        sizes = [FEWEST << at for at in range((MOST // FEWEST).bit_length())]
        return max((size for size in sizes if size * self._decoder.kept_bytes <= KEPT), default=0)

    def find(self, batch: MicroBatch) -> Recording | None:
        """A recording that the batch fits in, made now if needed; None if none can be made."""
        room = Room.of(batch.pieces)
        if room.tokens > self.most or starts(batch.pieces.lengths, room.tokens, room.longest) is None:
            return None
        if room.keys and not self._shares:
            return None
        if room not in self._made:
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

    begins = starts([], room.tokens, room.longest)
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
    begins = starts(given.lengths, size, own.longest)
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


def starts(lengths: list[int], tokens: int, longest: int) -> np.ndarray | None:
    """Where each row begins, the given rows first and then padding up to ``tokens``; None if there are too many."""
    used = sum(lengths)
    rest = [min(longest, tokens - at) for at in range(used, tokens, longest)]
    room = tokens // TOKENS_OF_A_ROW
    if len(lengths) + len(rest) > room:
        return None
    found = np.full(room + 1, tokens, np.int32)
    found[: len(lengths) + len(rest) + 1] = np.cumsum([0, *lengths, *rest])
    return found


def power_of_two(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
