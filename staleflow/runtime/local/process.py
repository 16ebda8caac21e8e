"""One process of a run, as the control plane's process sees it: start, talk, notice the end, stop.

child = Child(setup, log=run / "logs" / "i0.log")
await child.start(on_message, on_end)
child.send(Stop())
await child.stop()
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from staleflow.errors import ending
from staleflow.runtime.local.link import Channel
from staleflow.types import FromProcess, Setup, Stop

STOP_S = 10.0
"""A process that has been told to stop gets so long; then it is killed."""
REAP_S = 2.0
"""How long one that has closed its connection may take to end."""


class Child:
    def __init__(self, setup: Setup, log: Path) -> None:
        self.setup = setup
        self.log = log
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.broken = False
        """Whether it said that it cannot continue."""
        self.hung = ""
        """What it stood still at, if it was killed for that."""
        self._log_begin = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """CPU seconds that it has used; 0 where the system does not tell."""
        try:
            after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    async def start(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        threads = str(self.setup.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.log.open("ab") as log, theirs:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "staleflow.runtime.local.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the control plane alone
            )

        def ended() -> None:
            self.ended.set()
            on_end()

        self._channel = await Channel.open(ours, FromProcess, on_message, ended)
        self.send(self.setup)

    def send(self, message: msgspec.Struct) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def move(self, cores: Sequence[int]) -> None:
        """To other cores, with all its threads; it keeps their number."""
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError, AssertionError):  # it has ended, or cores have been taken away
                for thread in os.listdir(f"/proc/{self.pid}/task"):
                    os.sched_setaffinity(int(thread), cores)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def how_it_ended(self) -> str:
        """Once its connection is closed. One that lives on without it is killed."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, REAP_S)
        code = self._process.poll()
        self.kill()
        return "stood still" if self.hung else ending(code)

    async def stop(self) -> None:
        """Tell it to stop, wait for a while, then make it."""
        if self._process is None:
            return
        self.send(Stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.ended.wait()
        if self._channel is not None:
            self._channel.close()
        self.kill()
        await asyncio.to_thread(self._process.wait)

    def last_words(self) -> str:
        """The last that this one wrote to its log: usually why it died."""
        try:
            lines = self.log.read_bytes()[self._log_begin :].decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:300] if lines else ""
