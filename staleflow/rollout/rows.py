"""Columns with one row per running sequence, kept between steps so that decoding needs no loop over sequences.

A sequence has its row from admission to release. Only what changes is written: a page when one is added, a token and a
position per step for all decoding rows at once. ::

    rows = Rows(count=64, null_page=128)
    row = rows.open(sequence)
    rows.position[order] += 1
"""

import numpy as np
import numpy.typing as npt

from staleflow.rollout.sequence import NO_ROW, Sequence

Ints = npt.NDArray[np.int64]


def drawn_in(places: Ints) -> Ints:
    """In place of tokens that are not known yet: those that the step before draws in these of its places."""
    return -1 - places


class Rows:
    def __init__(self, count: int, null_page: int) -> None:
        self.null_page = null_page
        """Fills the table where a row has no page, so that a table can be read in full."""
        self.tables: Ints = np.full((count, 16), null_page, np.int64)
        self.position: Ints = np.zeros(count, np.int64)
        """Position of the token to run next."""
        self.token: Ints = np.zeros(count, np.int64)
        self.drawn: Ints = np.zeros(count, np.int64)
        """Tokens drawn so far: the counter of the row's random numbers."""
        self.seed = np.zeros(count, np.uint64)
        self.temperature = np.ones(count, np.float32)
        self.top_p = np.ones(count, np.float64)
        self.top_k: Ints = np.zeros(count, np.int64)
        self.min_p = np.zeros(count, np.float32)
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Free every row."""
        self._free = list(range(len(self.token) - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def open(self, sequence: Sequence) -> None:
        row = sequence.row = self._free.pop()
        sampling = sequence.request.sampling
        self.seed[row] = sequence.seed
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self._widen(len(sequence.pages))
        self.tables[row] = self.null_page
        self.tables[row, : len(sequence.pages)] = sequence.pages
        self.follow(sequence)

    def follow(self, sequence: Sequence) -> None:
        """Bring the row up to date with the sequence's last token."""
        row = sequence.row
        self.token[row] = sequence.tokens[-1]
        self.position[row] = len(sequence.tokens) - 1
        self.drawn[row] = sequence.made

    def add_page(self, sequence: Sequence, page: int) -> None:
        self._widen(len(sequence.pages) + 1)
        self.tables[sequence.row, len(sequence.pages)] = page
        sequence.pages.append(page)

    def close(self, sequence: Sequence) -> None:
        self._free.append(sequence.row)
        sequence.row = NO_ROW

    def _widen(self, pages: int) -> None:
        width = self.tables.shape[1]
        if pages > width:
            more = np.full((self.tables.shape[0], max(width, pages - width)), self.null_page, np.int64)
            self.tables = np.concatenate((self.tables, more), axis=1)
