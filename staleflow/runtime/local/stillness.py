"""Whether a run moves. Every process may be well and the run stand still all the same: that is a mistake of ours, and
not one to wait for in silence.

    stillness.look(sign, now)      # seconds since the sign last changed
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET_S = 15.0
"""Without a token, a reward or a version for this long, the run says what it waits for."""
STALL_S = 1800.0
"""And for this long, it ends."""


@dataclass(slots=True)
class Stillness:
    _sign: tuple[float, ...] = ()
    """How far the run was when it last moved."""
    _moved_at: float = 0.0

    def look(self, sign: tuple[float, ...], now: float, excused: bool) -> float:
        """``excused``: it waits for somebody who has a limit of his own."""
        if sign != self._sign or excused:
            self._sign, self._moved_at = sign, now
        return now - self._moved_at
