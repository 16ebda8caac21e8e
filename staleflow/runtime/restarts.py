"""How often a process may be started again: limited by rate, not over the life of a run.

    restarts.died("i0", now)        # seconds to wait before it is started again; None: it dies too often
    restarts.trusted("i0", up_s)    # whether it may get work, having been up for so long

A process that dies soon after its start waits longer each time, and then has to stay up for a while before it gets
work, so that it does not take the work of the others only to lose it again. One that had run well for a while starts
at once, however often that happens in a week.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MOST = 5
WITHIN_S = 600.0
"""More deaths than ``MOST`` within this time, and something is wrong that a restart does not mend."""
SOON_S = 30.0
"""A process that dies within this time of its start has not done anything useful."""
LONGEST_S = 60.0
TRIAL_S = 5.0
"""What has died soon after its start stays up so long before it gets work, for each time in a row after the first."""


@dataclass(slots=True)
class _History:
    deaths: deque[float] = field(default_factory=deque[float])
    started: float = float("-inf")
    in_a_row: int = 0
    """Deaths soon after a start, since the last that was not."""


@dataclass(slots=True)
class Restarts:
    most: int = MOST
    within_s: float = WITHIN_S
    _of: dict[str, _History] = field(default_factory=dict[str, _History])

    def started(self, name: str, now: float) -> None:
        self._of.setdefault(name, _History()).started = now

    def died(self, name: str, now: float) -> float | None:
        history = self._of.setdefault(name, _History())
        history.deaths.append(now)
        while history.deaths[0] <= now - self.within_s:
            history.deaths.popleft()
        if len(history.deaths) > self.most:
            return None
        history.in_a_row = history.in_a_row + 1 if now - history.started < SOON_S else 0
        return 0.0 if history.in_a_row <= 1 else min(LONGEST_S, 2.0 ** (history.in_a_row - 1))

    def trusted(self, name: str, up_s: float) -> bool:
        return name not in self._of or up_s >= TRIAL_S * (self._of[name].in_a_row - 1)

    def count(self, name: str) -> int:
        """Deaths within the time that counts."""
        return len(self._of[name].deaths) if name in self._of else 0
