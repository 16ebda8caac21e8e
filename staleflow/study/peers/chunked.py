"""Streamed consumption in chunks: a trainer that starts on whole chunks of groups only.

Not a peer: it shows what feeding single groups is worth. With chunks of a whole batch nothing is left of streaming.
"""

from staleflow.protocol import StalenessLedger


class ChunkedLedger(StalenessLedger):
    def __init__(self, batch_size: int, max_staleness: int, redundancy: int = 0, chunk: int = 1) -> None:
        super().__init__(batch_size, max_staleness, redundancy)
        self.chunk = chunk

    def take(self, limit: int | None = None) -> list[str]:
        if limit is None:  # a replay says how many were taken
            limit = self.takeable() // self.chunk * self.chunk
        return super().take(limit)
