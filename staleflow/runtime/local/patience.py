"""An event loop that is woken up at most once in a moment: whatever comes within it is handled together.

The control plane does little for each message, and most of what a message costs is to wake up a process whose code and
data have left the caches meanwhile. Moments begin ``DELAY_S`` after the ticks at which instances report
(``TICK_S`` in ``workers/rollout.py``; processes of one machine have one clock), so that the reports of all instances
are there, and are decided on, in one wake-up. What comes after a pause is handled at once; what comes later waits for
the next moment, except from those that ``hurry`` names and from other threads. Who has asked for something that will
be there sooner says so by ``expect``. ::

    summary = run_patiently(run.execute())
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector, SelectorKey
from typing import Any, TypeVar

from staleflow.workers.rollout import TICK_S

DELAY_S = 0.01
"""Of a moment behind the tick: an instance reports when its decoding step is done."""
T = TypeVar("T")


class PatientSelector(DefaultSelector):
    def __init__(self, moment_s: float = TICK_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._moment_s = moment_s
        self._clock = clock
        self._next = clock()
        self._urgent = DefaultSelector()

    def hurry(self, file: Any) -> None:
        self._urgent.register(file, EVENT_READ)

    def expect(self, seconds: float) -> None:
        """The present moment ends after this time, if not before."""
        self._next = min(self._next, self._clock() + seconds)

    def wait(self, seconds: float) -> None:
        """Until then, or until something urgent comes."""
        self._urgent.select(seconds)

    def unregister(self, fileobj: Any) -> SelectorKey:
        with suppress(KeyError):
            self._urgent.unregister(fileobj)
        return super().unregister(fileobj)

    def close(self) -> None:
        self._urgent.close()
        super().close()

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= 0:  # there is work at hand
            return super().select(0)
        began = self._clock()
        if began < self._next:
            self.wait(self._next - began)
            timeout = None if timeout is None else max(0.0, timeout - (self._clock() - began))
        events = super().select(timeout)
        moments = (self._clock() - DELAY_S) // self._moment_s
        self._next = (moments + 1) * self._moment_s + DELAY_S
        return events


class PatientLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._patient = PatientSelector()
        super().__init__(self._patient)
        for own in list(self._patient.get_map().values()):
            self._patient.hurry(own.fileobj)  # by which other threads and signals wake the loop up

    def hurry(self, file: Any) -> None:
        """What comes here is handled at once."""
        self._patient.hurry(file)

    def expect(self, seconds: float) -> None:
        """What comes within this time is handled together after it."""
        self._patient.expect(seconds)


def expect(seconds: float) -> None:
    """What was asked for is there in this time, which a loop that is patient may wait for in vain."""
    if isinstance(loop := asyncio.get_running_loop(), PatientLoop):
        loop.expect(seconds)


def run_patiently(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run`` does."""
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(main)
