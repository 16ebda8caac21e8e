"""One process of a run, as the control plane's process sees it: start or adopt, talk, notice the end, stop.

child = Child(setup, log=run / "logs" / "i0.log")
child.start(socket, on_message, on_end)         # or child.adopt(pid, ...) if an earlier control plane started it
child.arrived(channel, hello)                   # it has connected
child.send(Finish(3))
await child.stop()
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from staleflow.errors import ending
from staleflow.run.processes import MODULE
from staleflow.runtime.local.link import Channel
from staleflow.servers.weights.segments import start_time
from staleflow.types import Hello, Kept, Setup, Stop, TakeOver

STOP_S = 10.0
"""A process that has been told to stop and has not after this time is killed."""
REAP_S = 2.0
"""How long one that has closed its connection may take to end."""
LAST_WORDS_S = 0.5
"""How long after its end a process may still be heard: what it said last is read first."""
POLL_S = 0.25
"""How often to look where the kernel does not tell of an end."""
BEHIND = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""For a trainer: where processes compute on a GPU at the same time, by CUDA's Multi-Process Service, the kernels of
instances go first. They are short, and a trainer's are many."""


def spawn(path: Path, setup: Setup, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start the process on this machine."""
    threads = str(setup.threads)
    environment |= {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(path), setup.name, str(setup.incarnation), setup.run],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=(BEHIND if setup.role == "trainer" else {}) | os.environ | environment,
            start_new_session=True,  # Ctrl-C is for the control plane alone
        )


class Child:
    def __init__(self, setup: Setup, log: Path, term: int = 1) -> None:
        self.setup = setup
        self.log = log
        self.term = term
        """Of the control plane."""
        self.pid = 0
        self.adopted = False
        """Whether an earlier control plane started it."""
        self.code: int | None = None
        """Exit status, once known; of an adopted one only if the supervisor tells."""
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.broken = False
        """Whether it said that it cannot continue."""
        self.hung = ""
        """What it stood still at, if it was killed for that."""
        self.waits_for = ""
        """What it needs to be started, while it does not have that; and since when it waits."""
        self.waits_since = 0.0
        self._log_begin = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._began: int | None = 0
        """Start time of the process: with its pid, who it is."""
        self._channel: Channel | None = None
        self._unkept = 0, 0
        """The number of a message that was heard, and the position of the journal after all that came of it."""
        self._on_message: Callable[[Any], None] = lambda _: None
        self._on_end: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def starts(self) -> bool:
        """Whether it has no pid yet."""
        return not self.pid and not self.ended.is_set()

    @property
    def cpu_s(self) -> float:
        """CPU seconds that it and its own processes have used; 0 where the system does not tell."""
        ticks = 0
        for pid in self._family:
            with suppress(OSError):
                after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(after_name[11]) + int(after_name[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def _family(self) -> list[int]:
        """With what it has started itself, such as the other ranks of a trainer."""
        try:
            return [self.pid, *map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]
        except OSError:
            return [self.pid]

    def start(self, path: Path, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._log_begin = self.log.stat().st_size if self.log.exists() else 0
        self._process = spawn(path, self.setup, self.log)
        self._attend(self._process.pid, on_message, on_end)

    def adopt(self, pid: int, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """One that is alive already, and will connect."""
        self.adopted = True
        with suppress(OSError):
            self._log_begin = self.log.stat().st_size
        self._attend(pid, on_message, on_end)

    def arrived(self, channel: Channel, hello: Hello) -> None:
        self._channel = channel
        channel.on_message, channel.on_end = self._on_message, self._end
        if self.setup.role == "trainer":
            channel.hurry()
        self.send(TakeOver(self.term) if hello.set_up else self.setup)

    def send(self, message: msgspec.Struct) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def keep(self, position: int, durable: int) -> None:
        """Called from time to time with how far the journal is: tells the process which messages it need not repeat."""
        number, needed = self._unkept
        if self._channel is not None and needed <= durable:
            if number:
                self.send(Kept(number))
            heard = self._channel.heard
            self._unkept = (heard, position) if heard > number else (0, 0)

    def move(self, cores: Sequence[int]) -> None:
        """To other cores, with all its threads; it keeps their number."""
        for pid in self._family if hasattr(os, "sched_setaffinity") else ():
            with suppress(OSError):  # it has ended, or cores have been taken away
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), cores)

    def kill(self) -> None:
        if self._alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def how_it_ended(self) -> str:
        """Once its connection is closed. One that is still alive without it is killed."""
        await self._gone()
        self.kill()
        return "stood still" if self.hung else ending(self.code)

    async def stop(self) -> None:
        """Tell it to stop, wait for a while, then kill it."""
        if not self.pid:
            return
        self.send(Stop())
        if self._channel is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self.ended.wait()
            self._channel.close()
            await self._gone()
        self.kill()
        await self._gone()

    def last_words(self) -> str:
        """The last that this one wrote to its log: usually why it died."""
        try:
            lines = self.log.read_bytes()[self._log_begin :].decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:300] if lines else ""

    # Within

    def _attend(self, pid: int, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self.pid, self._began = pid, start_time(pid)
        self._on_message, self._on_end = on_message, on_end
        loop = asyncio.get_running_loop()
        try:
            handle = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not Linux, or gone already
            loop.call_later(POLL_S, self._poll)
            return

        def dead() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            self._dead()

        loop.add_reader(handle, dead)

    def _poll(self) -> None:
        if self._alive():
            asyncio.get_running_loop().call_later(POLL_S, self._poll)
        else:
            self._dead()

    def _dead(self) -> None:
        """The end of its connection follows, behind its last words."""
        if self._channel is None:
            self._end()
        else:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._end)

    def _end(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._on_end()

    def _alive(self) -> bool:
        if self._process is not None:
            self.code = self._process.poll()
            return self.code is None
        return bool(self.pid) and self._began is not None and start_time(self.pid) == self._began

    async def _gone(self) -> None:
        """Until the process has ended, for a while."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.code = await asyncio.to_thread(self._process.wait, REAP_S)
            return
        until = asyncio.get_running_loop().time() + REAP_S
        while self._alive() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
