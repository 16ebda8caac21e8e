"""The small process above the control plane: it starts another one in the place of one that died.

    def train(supervisor: Supervisor) -> int: ...
    exit_code = supervised(train)

``supervised`` forks. The child returns from it what ``train`` does, as if there were no parent; the parent stays,
passes signals on, and returns the child's exit code. A child that was killed by a signal (also for want of memory, or
by a segmentation fault) after it said what it runs is followed by another; one that ended by itself, or that somebody
asked to stop, is not. The processes of the run wait meanwhile, and the next control plane adopts them.

If the parent dies, the child stops the run in good order.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from staleflow.errors import ending
from staleflow.run.processes import end, processes
from staleflow.runtime.restarts import Restarts

ASKED = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
"""Who dies of one of these was asked to."""
PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36
STOP = "stop"


class Supervisor:
    """As the control plane sees it."""

    def __init__(self, told: int, hears: int, run: Path | None, deaths: Sequence[str]) -> None:
        self.run = run
        """What the control plane before this one ran; None if this is the first."""
        self.deaths = deaths
        """How those before this one ended, since the last that said what it runs."""
        self._told = told
        self._hears = hears

    def tell(self, run: Path) -> None:
        """What is to be continued, should this process die. Earlier deaths are known to the run by now."""
        os.write(self._told, f"{run}\n".encode())

    def attend(self, stop: Callable[[signal.Signals], None], reaped: Callable[[int, int], None]) -> None:
        """From now on ``stop`` is called when somebody wants the run to end, ``reaped`` with the pid and exit code of
        processes that an earlier control plane started."""
        loop = asyncio.get_running_loop()

        def come() -> None:
            data = os.read(self._hears, 1 << 16)
            if not data:  # it is dead
                loop.remove_reader(self._hears)
                stop(signal.SIGTERM)
            for line in data.decode().splitlines():
                word, _, code = line.partition(" ")
                if word == STOP:
                    stop(signal.SIGINT)
                else:
                    reaped(int(word), int(code))

        loop.add_reader(self._hears, come)

    def leave(self) -> None:
        asyncio.get_running_loop().remove_reader(self._hears)


def supervised(train: Callable[[Supervisor], int], restarts: Restarts | None = None) -> int:
    restarts = restarts or Restarts()
    _adopt_orphans()
    run: Path | None = None
    deaths: list[str] = []
    while True:
        restarts.started("control", time.monotonic())
        told, tells = os.pipe()
        hears, says = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            os.close(told)
            os.close(says)
            return train(Supervisor(tells, hears, run, deaths))
        os.close(tells)
        os.close(hears)
        code = _wait(child, says)
        os.close(says)
        if (said := _said(told)) is not None:
            run, deaths = said, []
        if code >= 0 or -code in ASKED:
            return code if code >= 0 else 128 - code
        deaths.append(ending(code))
        pause_s = restarts.died("control", time.monotonic()) if run is not None else None
        if pause_s is None:
            again = f"; continue with: staleflow train --resume {run}" if run is not None else ""
            often = f" {restarts.count('control')} times in {restarts.within_s / 60:g} minutes" if run else ""
            end(processes(run) if run is not None else ())
            print(f"staleflow: error: the control plane died{often}: {deaths[-1]}{again}", file=sys.stderr)
            return 128 - code
        time.sleep(pause_s)


def _said(told: int) -> Path | None:
    """What the control plane that has ended said that it runs."""
    os.set_blocking(told, False)
    try:
        lines = os.read(told, 1 << 16).decode().splitlines()
    except BlockingIOError:
        lines = []
    os.close(told)
    return Path(lines[0]) if lines else None


def _wait(child: int, says: int) -> int:
    """Until the control plane has ended. Passes on what comes meanwhile."""

    def pass_on(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    def stop(_number: int, _frame: object) -> None:
        """A terminal sends it to both processes, other programs to this one: said another way, it counts once."""
        _say(says, STOP)

    before = {each: signal.signal(each, pass_on) for each in PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    try:
        while True:
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            if pid == child:
                return code
            _say(says, f"{pid} {code}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(says: int, line: str) -> None:
    with suppress(OSError):
        os.write(says, f"{line}\n".encode())


def _adopt_orphans() -> None:
    """Processes whose control plane died become children of this process, which hears how they end. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
