"""An event loop that is woken up at most every ``MOMENT_S``: whatever comes within a moment is handled together.

The control plane does little for each message, and most of what a message costs is to wake up a process whose code and
data have left the caches meanwhile. With reports, rewards and timers taken together it is woken up a quarter as often.
What comes after a pause is handled at once; what comes later waits for the rest of the moment. ::

    summary = run_patiently(run.execute())
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from selectors import DefaultSelector, SelectorKey
from typing import Any, TypeVar

MOMENT_S = 0.025
"""Half of the time between two decisions."""
T = TypeVar("T")


class PatientSelector(DefaultSelector):
    def __init__(
        self,
        moment_s: float = MOMENT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self._moment_s = moment_s
        self._clock = clock
        self._sleep = sleep
        self._woken = -moment_s

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= 0:  # there is work at hand
            return super().select(0)
        pause_s = self._woken + self._moment_s - self._clock()
        if pause_s > 0:
            self._sleep(pause_s)
            timeout = None if timeout is None else max(0.0, timeout - pause_s)
        events = super().select(timeout)
        self._woken = self._clock()
        return events


def run_patiently(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run`` does."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(PatientSelector())) as runner:
        return runner.run(main)
