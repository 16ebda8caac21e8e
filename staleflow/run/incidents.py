"""What went wrong in a run and was put right: shown at once, and counted for the summary.

incidents = Incidents(tell=print)
incidents.note("i0 died: killed (SIGKILL; out of memory?); started again")
incidents.rarely("reward", "reward of p3/1 failed: ...", now)       # the first, then now and then
count(record.restarts, "instance", "stood still")
"""

from collections import deque
from collections.abc import Callable

RARELY_S = 5.0
"""What happens again and again is shown no more often than this."""
SHOWN = 12
"""The latest, for a view with room for them."""


class Incidents:
    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._notes: deque[str] = deque(maxlen=SHOWN)
        self._told: dict[str, float] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """The latest, oldest first."""
        return tuple(self._notes)

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._tell(text)

    def rarely(self, kind: str, text: str, now: float) -> None:
        if now - self._told.get(kind, float("-inf")) >= RARELY_S:
            self._told[kind] = now
            self.note(text)


def count(counts: dict[str, dict[str, int]], what: str, why: str) -> None:
    reasons = counts.setdefault(what, {})
    reasons[why] = reasons.get(why, 0) + 1
