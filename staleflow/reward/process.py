"""One reward worker, as the pool sees it: start, a batch of jobs, its answers in order, and how it ends.

A batch is sent in one system call, and all answers that are there are read in one. One timer limits the time of the job
that the worker is busy with. ::

    worker = Worker(*started(command, stderr), timeout_s=10, listener=pool)
    await worker.ready(timeout_s=60)            # RewardError if it cannot be
    worker.give(due, frame)                     # the listener gets each answer, then ``idle`` or ``lost``
    await worker.end()
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple, Protocol

from staleflow.errors import ending
from staleflow.reward.environment import environment
from staleflow.reward.function import RewardError
from staleflow.reward.wire import Answer, Job, answers

LAST_WORDS_S = 2.0
"""How long a worker whose output has ended may take to exit."""
PIECE = 1 << 18


class Due(NamedTuple):
    """A response that is to be scored, and the job that it makes."""

    name: str
    job: Job


class WorkerLostError(Exception):
    """The worker died, or answered nonsense."""


class Listener(Protocol):
    def answered(self, due: Due, answer: Answer) -> None: ...

    def idle(self, worker: Worker) -> None:
        """The worker has answered everything that it was given."""
        ...

    def lost(self, worker: Worker, why: str) -> None:
        """The worker can no longer be used. It was busy with the first job that is still ``due``."""
        ...


def started(
    command: Sequence[str],
    stderr: int | IO[bytes] | None,
    named: Sequence[str] = (),
    setting: str = "reward.environment",
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A new process, and the connection to it. ``named``: further variables that it sees, given by ``setting``."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=stderr,
            env=environment(named, setting=setting),
            start_new_session=True,  # so that what it starts can be killed with it
        )
    return ours, process


class Worker:
    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[bytes] | None, timeout_s: float, listener: Listener
    ) -> None:
        """``process``: None if it ends with the connection (``forks.py``)."""
        self.due: deque[Due] = deque()
        """Jobs that it has not answered, in order."""
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._listener = listener
        self._frames = answers()
        self._ready: asyncio.Future[str] = self._loop.create_future()
        """Resolved when the worker is ready (empty), or with the reason why it is not."""
        self._unsent = b""
        self._stuck = False
        """Whether the rest of a batch waits until the worker has read some."""
        self._closed = False
        self._busy_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._process = process
        self._socket = connection
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)

    async def ready(self, timeout_s: float) -> None:
        """Wait until it has loaded everything; ``RewardError`` if it cannot."""
        try:
            async with asyncio.timeout(timeout_s):
                why = await self._ready
        except TimeoutError:
            why = f"the reward function was not loaded within {timeout_s:g} s"
        except WorkerLostError:
            why = f"the reward function cannot be loaded: {await self.last_words()}"
        if why:
            raise RewardError(why)

    def give(self, due: deque[Due], frame: bytes) -> None:
        """Score these responses; ``frame`` has their jobs."""
        self.due = due
        self._busy_since = self._loop.time()
        self._unsent = frame
        self._send()
        if self._timer is None:
            self._timer = self._loop.call_at(self._busy_since + self._timeout_s, self._overdue)

    async def last_words(self) -> str:
        """How it ended, once its output has ended."""
        if self._process is None:
            return "the reward worker ended"
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, LAST_WORDS_S)
        return f"the reward worker ended: {ending(self._process.returncode)}"

    async def end(self) -> None:
        """Kill it with everything that it started."""
        self._close()
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    # What it says

    def _read(self) -> None:
        """All answers that are there."""
        try:
            data = self._socket.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("")
            return
        was_busy = bool(self.due)
        self._busy_since = self._loop.time()
        try:
            for answer in self._frames.feed(data):
                if not self._ready.done():
                    self._ready.set_result(answer.why)
                elif not self.due or answer.number != self.due[0].job.number:
                    raise ValueError(f"number {answer.number}, which it was not sent")
                else:
                    self._listener.answered(self.due.popleft(), answer)
        except ValueError as error:
            self._lose(f"the reward worker answered nonsense ({error})")
        if was_busy and not self.due and not self._closed:
            self._listener.idle(self)

    def _send(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # it has died, which is noticed by its output
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._stuck = True
            self._loop.add_writer(self._socket, self._send)
        elif self._stuck:
            self._stuck = False
            self._loop.remove_writer(self._socket)

    # Within

    def _overdue(self) -> None:
        """One timer for all jobs: checks how long the current one has taken."""
        self._timer = None
        if not self.due or self._closed:
            return
        left = self._busy_since + self._timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._overdue)
        else:
            self._lose(f"the reward took more than {self._timeout_s:g} s")

    def _lose(self, why: str) -> None:
        if self._closed:
            return
        self._close()
        if self._ready.done():
            self._listener.lost(self, why)
        else:
            self._ready.set_exception(WorkerLostError(why))

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()
