"""The ways to decode on a GPU, and which of them are worth trying for a graph.

ways = Ways(few, chain)
for way in ways.worth(rows=96, longest=4096): ...   # besides PLAIN, which always works
ways.failed(way)                                    # it cannot be used here, or its logits are wrong
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from staleflow.rollout.chain_plan import PARTED, WHOLE, WIDE, Form
from staleflow.rollout.rows import Ints

PLAIN, ATTENDED = "plain", "attention of the chain"
CHAINED = {"chain": WHOLE, "chain, wide": WIDE, "chain, parted": PARTED}
FEW = "few, looking at values", "few, at barriers"
"""Blocks of few.cu wait for each other in one of two ways: the second is tried if the first is wrong."""
FEWEST_ATTENDED = 48
"""Rows from which on it may pay to take the attention of the chain without its products."""


class FewLike(Protocol):
    def fits(self, rows: int) -> bool: ...


class ChainLike(Protocol):
    @property
    def attends(self) -> bool: ...

    def forms(self, rows: int, longest: int) -> list[Form]: ...


class Ways:
    def __init__(self, few: FewLike | None, chain: ChainLike | None) -> None:
        self._few, self._chain = few, chain
        self._failed: set[str] = set()

    def worth(self, rows: int, longest: int, settled: str | None = None) -> Iterator[str]:
        """Those that may be the fastest for so many rows of at most ``longest`` tokens, as far as is known by then.
        ``settled``: this one alone, if it can be used."""
        for way in (*FEW, *CHAINED, ATTENDED):
            if settled in (None, way) and way not in self._failed and self._suits(way, rows, longest):
                yield way

    def failed(self, way: str) -> None:
        """Without its first form the chain is not tried at all."""
        self._failed |= {*CHAINED} if CHAINED.get(way) == WHOLE else {way}

    def _suits(self, way: str, rows: int, longest: int) -> bool:
        if way in FEW:
            return self._few is not None and self._few.fits(rows) and (way == FEW[0] or FEW[0] in self._failed)
        if self._chain is None:
            return False
        if way == ATTENDED:
            return self._chain.attends and rows >= FEWEST_ATTENDED
        return CHAINED[way] in self._chain.forms(rows, longest)


def spread(rows: int, last: int) -> Ints:
    """Positions of rows, from the first to the last one, most of them early, in no order: as in a run, where few
    contexts are long and everybody waits for those."""
    share = (np.random.default_rng(0).permutation(rows) + 0.5) / rows
    return (last * (share**2 if rows > 1 else share)).astype(np.int64)
