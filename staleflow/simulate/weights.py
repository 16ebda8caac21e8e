"""The parameter server under simulation: the newest version, and how long it takes to load it.

All pulls share the server's bandwidth fairly, and none is faster than its own link. Because every pull gets the same
rate at any moment, one running total of bytes served per pull says when each is done: no pull is ever touched again.
"""

import asyncio
import heapq
from collections.abc import Callable


class SimWeights:
    def __init__(self, nbytes: float, link_bandwidth: float, total_bandwidth: float) -> None:
        self.nbytes = nbytes
        self.version = 0
        """The newest durable version."""
        self._link = link_bandwidth
        self._total = total_bandwidth
        self._served = 0.0
        self._since = 0.0
        self._pulls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def fetch(self, done: Callable[[], None]) -> None:
        """Load the newest version; ``done`` is called when all bytes are there."""
        self._serve()
        self._count += 1
        heapq.heappush(self._pulls, (self._served + self.nbytes, self._count, done))
        self._arm()

    def _rate(self) -> float:
        return min(self._link, self._total / len(self._pulls))

    def _serve(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._pulls:
            self._served += self._rate() * (now - self._since)
        self._since = now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._pulls:
            left = max(0.0, self._pulls[0][0] - self._served)
            self._timer = asyncio.get_running_loop().call_later(left / self._rate(), self._finish)

    def _finish(self) -> None:
        self._serve()
        first = self._pulls[0][0]  # the one the timer was set for, whatever rounding says
        while self._pulls and self._pulls[0][0] <= max(first, self._served):
            heapq.heappop(self._pulls)[2]()
        self._arm()
