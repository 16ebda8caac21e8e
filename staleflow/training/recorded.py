"""Small passes as CUDA graphs: two launches instead of some thousand, which would take longer than the work itself.

    recording = recordings.find(batch)            # None: the pass is too large for one, or its rows share a prompt
    hidden_TH = recording.forward(batch)
    recording.backward(d_hidden_TH)

A recording is made for a power of two of tokens. A smaller batch is padded with rows that nothing reads: they have no
gradient, so they add exactly 0. Recordings share their memory, so the backward of a pass must end before the next
pass begins.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from staleflow.training.decoder import Decoder, Places
from staleflow.training.micro_batches import MicroBatch, moved
from staleflow.training.pieces import Pieces

FEWEST, MOST = 512, 4096
"""Tokens of a recording. Above, the GPU's work takes longer than the launches."""
SHORTEST = 256
"""Least tokens that a recording allows its longest row."""
KEPT = 3 << 29
"""Most bytes that a recording may keep from forward to backward."""
TOKENS_OF_A_ROW = 4
"""A recording has room for rows of this many tokens on average."""


class Recordings:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._pool = None
        self._made: dict[tuple[int, int], Recording] = {}

    def find(self, batch: MicroBatch) -> Recording | None:
        """A recording that the batch fits in, made now if needed; None if none can be made."""
        pieces = batch.pieces
        tokens = power_of_two(batch.tokens_L.numel(), FEWEST)
        longest = power_of_two(pieces.longest, SHORTEST)
        if pieces.context is not None or tokens > MOST or tokens * self._decoder.kept_bytes > KEPT:
            return None
        if starts(pieces.lengths, tokens, longest) is None:
            return None
        if (tokens, longest) not in self._made:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._made[tokens, longest] = Recording(self._decoder, tokens, longest, self._pool)
        return self._made[tokens, longest]


class Recording:
    def __init__(self, decoder: Decoder, tokens: int, longest: int, pool: object) -> None:
        device = decoder.embedding.value.device

        def zeros() -> Tensor:
            return torch.zeros(tokens, dtype=torch.int64, device=device)

        rows = Pieces([], _starts([], tokens, longest, device), longest)
        self._places = Places(zeros(), zeros(), zeros(), rows)
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
        places, tokens, generated = self._places, batch.tokens_L.numel(), batch.predicting_T.numel()
        places.tokens_L[:tokens].copy_(batch.tokens_L)
        places.positions_L[:tokens].copy_(batch.positions_L)
        places.predicting_T[:generated].copy_(batch.predicting_T)
        places.predicting_T[generated:].fill_(places.tokens_L.numel() - 1)  # the last token predicts none
        size, device, own = places.tokens_L.numel(), places.tokens_L.device, places.pieces
        own.starts_N.copy_(_starts(batch.pieces.lengths, size, own.longest, device))
        self._forward.replay()
        return self._hidden[:generated]

    def backward(self, d_hidden_TH: Tensor) -> None:
        generated = d_hidden_TH.shape[0]
        self._d_hidden[:generated].copy_(d_hidden_TH)
        self._d_hidden[generated:].zero_()
        self._backward.replay()


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


def _starts(lengths: list[int], tokens: int, longest: int, device: torch.device) -> Tensor:
    found = starts(lengths, tokens, longest)
    assert found is not None
    return moved(torch.from_numpy(found), device)


def power_of_two(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
