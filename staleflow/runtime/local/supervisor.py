"""The small process above the control plane: it starts another one in the place of one that died.

    def train(supervisor: Supervisor) -> int: ...
    exit_code = supervised(train)

``supervised`` forks. The child returns from it what ``train`` does, as if there were no parent; the parent stays,
passes signals on, and returns the child's exit code. A child that was killed by a signal (also for want of memory, or
by a segmentation fault) after it said what it runs, or that was to resume a run, is followed by another, and so is one
that found the disk full when it began. One that ended by itself otherwise, or was asked to stop, is not; one that
stands still is named, and killed after a minute. The processes of the run wait meanwhile, and the next control plane
adopts them. Before the control plane listens for signals, and between two of them, a request to stop is a
``KeyboardInterrupt``.

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
from typing import Self

from staleflow.errors import INTERRUPTED, ending
from staleflow.observe.output import remark
from staleflow.readable import readable
from staleflow.run.continuing import continuing, stored_reward
from staleflow.run.processes import end, processes
from staleflow.runtime.restarts import Restarts
from staleflow.runtime.watchdog import Watchdog

ASKED = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
"""Who dies of one of these was asked to."""
PR_SET_CHILD_SUBREAPER = 36
STOP, MOVES, LEAVES, STORED = "stop", "moves", "leaves", "stored"
BEAT_S = 1.0
HUNG_S = 60.0
CONTROL = "the control plane"
NO_ROOM = 75
"""The exit code of a control plane that found the disk full before it had the run in hand."""
ROOM_S = 2.0
"""Until the next one tries."""


def requests() -> list[signal.Signals]:
    """The signals that ask a run to stop. ``nohup`` ignores one of them, and so does the run."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if ignored else [signal.SIGHUP])


class Supervisor:
    """As the control plane sees it."""

    def __init__(
        self, tells: int, hears: int, run: Path | None = None, stored: bool = False, deaths: Sequence[str] = ()
    ) -> None:
        self.run = run
        """What the control plane before this one ran; None if this is the first."""
        self.stored = stored
        """Whether one before this one stored the settings with which it is run; they may have changed since."""
        self.deaths = deaths
        """How those before this one ended, since the last that said what it runs."""
        self.told = run is not None
        """Whether it is known what is to be continued."""
        self._tells = tells
        self._hears = hears
        self._beat: asyncio.TimerHandle | None = None

    def tell(self, run: Path, stored: bool = False) -> None:
        """What is to be continued, should this process die, and whether its settings are stored. Earlier deaths are
        known to the run by now."""
        self.told = True
        _say(self._tells, str(run))
        if stored:
            _say(self._tells, STORED)

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

        def beat() -> None:
            _say(self._tells, MOVES)
            self._beat = loop.call_later(BEAT_S, beat)

        loop.add_reader(self._hears, come)
        beat()

    def leave(self) -> None:
        asyncio.get_running_loop().remove_reader(self._hears)
        if self._beat is not None:
            self._beat.cancel()
        _say(self._tells, LEAVES)


def supervised(
    train: Callable[[Supervisor], int], restarts: Restarts | None = None, resumes: Path | None = None
) -> int:
    """``resumes``: the run that is there already; what dies before it has it in hand is followed by another, too."""
    restarts = restarts or Restarts()
    _adopt_orphans()
    run: Path | None = None
    deaths: list[str] = []
    stored = full = False
    with _Asks() as asks:
        while True:
            restarts.started("control", time.monotonic())
            told, tells = os.pipe()
            hears, says = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            child = asks.fork(says)
            if not child:
                os.close(told)
                os.close(says)
                return train(Supervisor(tells, hears, run, stored, deaths))
            os.close(tells)
            os.close(hears)
            watch = Watch(child, told, says)
            code = watch.ended()
            asks.gone()
            os.close(told)
            os.close(says)
            if watch.run is not None:
                run, deaths = watch.run, []
            stored |= watch.stored
            if code == NO_ROOM and run is not None:
                if not full:
                    remark(f"no room on the disk of {run}: continues when there is")
                full = True
                if asks.wait(ROOM_S):
                    code = _stopped(run)
                    break
                continue
            full = False
            if code >= 0 or -code in ASKED:
                break
            deaths.append("stood still" if watch.killed else ending(code))
            known = run or resumes
            pause_s = restarts.died("control", time.monotonic()) if known is not None else None
            if pause_s is None:
                often = f" {restarts.count('control')} times in {restarts.within_s / 60:g} minutes" if known else ""
                remark(f"error: the control plane died{often}: {deaths[-1]}{_again(known)}")
                break
            if asks.wait(pause_s):
                code = _stopped(known)
                break
    code = code if code >= 0 else 128 - code
    if code > 128 and run is not None:  # by a signal: it has not ended what it started or was to adopt
        end(processes(run))
    return code


def _stopped(run: Path | None) -> int:
    remark(f"stopped while the control plane was dead{_again(run)}")
    return INTERRUPTED


def _again(run: Path | None) -> str:
    if run is None:
        return " before it had begun: give the same command again"
    return f"; continue with: {continuing(run, stored_reward(run))}"


class _Asks:
    """Passes requests to stop on to the control plane, and remembers them while there is none."""

    def __init__(self) -> None:
        self._child = 0
        self._says = -1
        self._asked = False

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._heard) for each in requests()}
        return self

    def __exit__(self, *_: object) -> None:
        if self._child >= 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def fork(self, says: int) -> int:
        """As ``os.fork``. No request is lost in between."""
        numbers = tuple(self._before)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self._child, self._says = os.fork(), says
        if not self._child:
            self._child = -1
            for number in numbers:
                signal.signal(number, signal.default_int_handler)
        elif self._asked:
            os.kill(self._child, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        return max(0, self._child)

    def gone(self) -> None:
        self._child = 0

    def wait(self, seconds: float) -> bool:
        """Whether somebody has asked, by then or before the control plane died."""
        until = time.monotonic() + seconds
        while not self._asked and time.monotonic() < until:
            time.sleep(0.05)
        return self._asked

    def _heard(self, number: int, _frame: object) -> None:
        self._asked = True
        if self._child and number == signal.SIGINT:
            _say(self._says, STOP)  # a terminal sends it to both processes: said another way, it counts once
        elif self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


class Watch:
    """Of one control plane, until it ends."""

    def __init__(self, child: int, told: int, says: int) -> None:
        self.run: Path | None = None
        """What it said that it runs."""
        self.stored = False
        self.killed = False
        """For standing still."""
        self._child, self._told, self._says = child, told, says
        self.watchdog = Watchdog(HUNG_S, BEAT_S)

    def ended(self) -> int:
        """Its exit code, when it has. It hears how processes end that an earlier one started."""
        while True:
            speaks = self.heard() if readable([self._told], BEAT_S) else True
            while (found := os.waitpid(-1, os.WNOHANG if speaks else 0))[0]:
                code = os.waitstatus_to_exitcode(found[1])
                if found[0] == self._child:
                    self.heard()
                    return code
                _say(self._says, f"{found[0]} {code}")
            for each in self.watchdog.look(time.monotonic()):
                if each.news:
                    remark(each)
                if each.lost:
                    self.killed = True
                    os.kill(self._child, signal.SIGKILL)

    def heard(self) -> bool:
        """Whether it has anything to say with."""
        os.set_blocking(self._told, False)
        now = time.monotonic()
        try:
            said = os.read(self._told, 1 << 16)
        except BlockingIOError:
            return True
        for line in said.decode().splitlines():
            if line == STORED:
                self.stored = True
                continue
            if line not in (MOVES, LEAVES):
                self.run = Path(line)
                continue
            self.watchdog.done(CONTROL, MOVES, now)
            if line == MOVES:
                self.watchdog.asked(CONTROL, MOVES, "its event loop", now)
        return bool(said)


def _say(says: int, line: str) -> None:
    with suppress(OSError):
        os.write(says, f"{line}\n".encode())


def _adopt_orphans() -> None:
    """Processes whose control plane died become children of this process, which hears how they end. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
