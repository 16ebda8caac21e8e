"""The live view of a run in a terminal, and one plain line per step where there is none.

``StatusView`` is a status as rich can draw it; it reads nothing else. ``TerminalView`` decides when
to draw: at most four times a second, and nothing at all where the output is not a terminal::

    view = TerminalView(plain=options.plain)
    view.update(status)         # as often as you like
    view.line(status)           # after every step
    view.close()

Showing a run must never end it: when the output goes away (``| head``), the view falls silent.
"""

import sys
import time
from collections.abc import Callable
from typing import IO, Self, cast

from rich.console import Console
from rich.live import Live

from staleflow.observe.layout import StatusView, clean, mean_reward
from staleflow.observe.marks import decimal, duration, number, percent
from staleflow.observe.output import Output
from staleflow.observe.status import Status

PERIOD_S = 0.25


def plain_line(status: Status, evaluated: int = -1) -> str:
    """The status in one line without colours, in columns. ``evaluated``: the version whose evaluation an earlier line
    has told."""
    width = len(str(status.steps))
    parts = [
        f"step {status.step:>{width}}/{status.steps}",
        f"{duration(status.seconds):>7}",
        f"reward {decimal(status.reward):>6}",
        f"loss {decimal(status.loss, 4):>8}",
        f"staleness {decimal(status.mean_staleness, 2):>4} (max {_or_dash(status.max_staleness)})",
        f"{number(status.trained_tokens_per_s):>5} tokens/s",
        f"idle {percent(status.trainer_idle):>5}",
        f"wasted {percent(status.wasted):>5}",
    ]
    shares = (("cut", status.cut), ("no signal", status.without_signal))
    parts += [f"{name} {percent(share):>5}" for name, share in shares if share]
    if status.accuracy and status.accuracy[-1][0] != evaluated:
        version, value = status.accuracy[-1]
        of = f" (version {version})" if version != status.step else ""
        parts.append(f"held-out {mean_reward(status, value)}{of}")
    return clean("  ".join(parts))


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


class TerminalView:
    def __init__(
        self, file: IO[str] | Output | None = None, plain: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._output = Output(file or sys.stdout)  # left to itself rich ends the process when a pipe breaks
        self._clock = clock
        self._drawn_at = float("-inf")
        self._pending: Status | None = None
        """The newest status, if it is not on the screen."""
        self._printed: int | None = None
        """The last step that has a line."""
        self._evaluated = -1
        """The version whose evaluation a line has told last."""
        self._phase = ""
        self._live: Live | None = None
        if not plain and self._output.isatty():
            console = Console(file=cast(IO[str], self._output))
            if not console.is_dumb_terminal:
                self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def update(self, status: Status) -> None:
        """Draws it if the last drawing is old enough; else a later call does, or ``close``."""
        if self._live is None:
            return
        self._pending = status
        now = self._clock()
        if now - self._drawn_at >= PERIOD_S:
            self._drawn_at = now
            self._draw(self._live)

    def line(self, status: Status) -> None:
        """Prints a line if there is no live view and this step has none yet."""
        if self._live is None and status.step != self._printed:
            self._printed = status.step
            self._say(plain_line(status, self._evaluated))
            self._evaluated = status.accuracy[-1][0] if status.accuracy else -1

    def phase(self, text: str) -> None:
        """Prints what a run that does not train is doing, once; a live view shows it by its status. How far it is with
        that, after a colon, is not said again."""
        what, _, _ = text.partition(":")
        if self._live is None and text and what != self._phase:
            self._phase = what
            self._say(clean(text))

    def note(self, text: str) -> None:
        """Prints a line about something that went wrong; a live view shows it by its status."""
        if self._live is None:
            self._say(f"note: {clean(text)}")

    def close(self) -> None:
        """Leaves the last status on the screen, and the terminal as it was. May be called again."""
        if self._live is not None:
            self._draw(self._live)
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, line: str) -> None:
        self._output.write(f"{line}\n")
        self._output.flush()

    def _draw(self, live: Live) -> None:
        if self._pending is not None:
            live.start()
            live.update(StatusView(self._pending), refresh=True)
            self._pending = None
