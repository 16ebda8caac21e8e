"""What a command is doing, how far it is and how long it will still take: on standard error.

    with Progress("plan") as progress:
        progress.say("bound 1, 128 groups, 8 instances")
        progress.reach(0.25)        # a share of the work

On a terminal it is one line that is rewritten, and gone at the end. Elsewhere it is a short line now and then, the
first after half a second, so that what ends at once says nothing. A thread writes them, so a long computation is not
silent either.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

FIRST_S = 0.5
"""A plain line after this time."""
PLAIN_S = 10.0
"""Between two plain lines."""
DRAW_S = 0.25
"""Between two on a terminal."""
LEAST_SHARE = 0.03
"""With less done, nobody can say how long the rest takes."""


class Progress:
    def __init__(
        self,
        name: str,
        look: Callable[[], float] | None = None,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``look`` gives the share that is done, instead of ``reach``; it is called by another thread."""
        self._name = name
        self._look = look
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._clock = clock
        self._began = clock()
        self._due = 0.0 if self._terminal else FIRST_S
        self._doing = "starts"
        self._share = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True, name="progress")

    def say(self, doing: str) -> None:
        self._doing = doing

    def reach(self, share: float) -> None:
        self._share = share

    def line(self) -> str:
        """Such as ``staleflow plan: 25 % in 0:12, about 0:36 left: bound 1, 128 groups, 8 instances``."""
        share = min(1.0, self._look() if self._look is not None else self._share)
        passed = self._clock() - self._began
        left = f", about {_time(passed / share - passed)} left" if share >= LEAST_SHARE else ""
        return f"staleflow {self._name}: {share:.0%} in {_time(passed)}{left}: {self._doing}"

    def show(self) -> None:
        """Write the line, if it is time for one."""
        passed = self._clock() - self._began
        if passed < self._due:
            return
        self._due = passed + (DRAW_S if self._terminal else PLAIN_S)
        text = self.line()
        print(f"\r\033[K{text}" if self._terminal else text, end="\r" if self._terminal else "\n", file=self._out)
        self._out.flush()

    def _tick(self) -> None:
        while not self._ended.wait(DRAW_S):
            self.show()

    def __enter__(self) -> Progress:
        self.show()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            print("\r\033[K", end="", file=self._out, flush=True)


def _time(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
