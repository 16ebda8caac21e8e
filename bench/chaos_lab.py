"""A real run of ``staleflow train`` and what is done to it: faults from outside, and everything it says with the time.

    victim = Victim(words, folder)
    victim.start()
    victim.wait(lambda: victim.version >= 3, "the first steps")
    os.kill(victim.pids("trainer")[0], signal.SIGKILL)

Nothing in here looks into the run's processes: they are found by the logs that they write to (Linux). Folders that may
become full are mounts of a namespace of their own, so the machine's disk and shared memory are never filled.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "import sys; from staleflow.cli import main; sys.exit(main())"
STEP = re.compile(r"step +(\d+)/")
SHARED = Path("/dev/shm")
PARENT_DEATH_SIGNAL = 1
NEW_USER, NEW_MOUNTS, PRIVATE, DETACH = 0x10000000, 0x00020000, 1 << 18 | 1 << 14, 2
"""Flags of Linux: unshare, mount, umount2."""


class Said(NamedTuple):
    time: float
    line: str


class HangError(Exception):
    """The run did not do in time what it was waited for."""


class Victim:
    """One run over all its attempts. ``words``: its settings."""

    def __init__(self, words: Sequence[str], folder: Path, command: str = TRAIN) -> None:
        self.words = list(words)
        self.folder = folder
        self.said: list[Said] = []
        """On standard error, by all attempts."""
        self.codes: list[int] = []
        """How the attempts ended."""
        self.summary: dict[str, Any] = {}
        self.run: Path | None = None
        self.version = 0
        self._command = command
        self._began = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    # Start and end

    def start(self) -> None:
        """The run, or its next attempt."""
        words = [*self.words, f"runs={self.folder}"] if self.run is None else ["--resume", str(self.run)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._command, "train", *words, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._began = len(self.said)
        self._reader = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._reader.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("run "):
                self.run = Path(line[4:].strip())
            elif step := STEP.match(line):
                self.version = int(step[1])
            self.said.append(Said(time.monotonic(), line.rstrip()))

    @property
    def supervised(self) -> bool:
        """Whether the process that was started is not the one that owns the run."""
        return self._process is not None and self.control not in (0, self._process.pid)

    @property
    def silent(self) -> bool:
        """Whether this attempt has said nothing: perhaps the interpreter was still starting."""
        return len(self.said) == self._began

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ended(self, limit_s: float) -> int:
        """Wait for the end of this attempt; how it ended."""
        process, reader = self._process, self._reader
        assert process is not None
        assert process.stdout is not None
        assert reader is not None
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise HangError(f"the run did not end within {limit_s:g} s; last: {self.last()}") from None
        reader.join(10)
        self.codes.append(process.returncode)
        if out := process.stdout.read().strip():
            self.summary = json.loads(out)
        return process.returncode

    def signal(self, number: int) -> None:
        """To the process that was started. Nothing happens if it has ended."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill_tree(self) -> None:
        """Everything that belongs to the run, in the order of the process numbers."""
        for _ in range(3):  # what was being started meanwhile
            self.signal(signal.SIGKILL)
            for pid in sorted({pid for _, pid in self.processes()} | ({self.control} - {0})):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # What it does

    def wait(self, until: Callable[[], bool], what: str, limit_s: float = 300.0) -> None:
        """``HangError`` if that does not come, or if the run has ended before."""
        deadline = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > deadline:
                raise HangError(f"{what}: not within {limit_s:g} s; last: {self.last()}")
            if not self.alive:
                raise HangError(f"{what}: the run ended before; last: {self.last()}")
            time.sleep(0.02)

    def last(self) -> str:
        return self.said[-1].line[:300] if self.said else "nothing"

    def after(self, begin: float, pattern: str) -> float | None:
        """Seconds from ``begin`` until it said something like this."""
        return next((at - begin for at, line in list(self.said) if at >= begin and re.match(pattern, line)), None)

    # Its processes

    @property
    def control(self) -> int:
        """The process that owns the run; 0 if there is none."""
        if self.run is None:
            return 0
        lock = self.run / "lock"
        with suppress(OSError):
            owner = re.match(r"process (\d+)", lock.read_text())
            if owner and str(lock) in map(os.readlink, Path(f"/proc/{owner[1]}/fd").iterdir()):
                return int(owner[1])
        return 0

    def processes(self) -> list[tuple[str, int]]:
        """Name and number of every process of the run but the control plane's: i0, trainer, evaluator, reward, ..."""
        found: list[tuple[str, int]] = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                log = Path(os.readlink(process / "fd/2"))
                if self.run is not None and log.parent == self.run / "logs":
                    judges = b"staleflow.reward.worker" in (process / "cmdline").read_bytes() and log.stem != "reward"
                    found.append((f"{log.stem} reward" if judges else log.stem, int(process.name)))
        return found

    def pids(self, name: str) -> list[int]:
        return [pid for each, pid in self.processes() if each == name]

    def left_behind(self) -> list[str]:
        """Processes that use something of the run although it has ended, and shared memory that nobody has mapped."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                for each in (process / "fd").iterdir():
                    if self.run is not None and os.readlink(each).startswith(f"{self.run}/"):
                        found.append(f"process {process.name} {(process / 'cmdline').read_bytes()[-80:]!r}")
                        break
        return found


def die_with_parent() -> None:
    """A bench that is killed leaves nothing behind. Nor does it matter how the bench itself was started."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def age_s(pid: int) -> float:
    """Seconds since the process was started; 0 if it is gone."""
    with suppress(OSError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


# A reward service


class Service:
    """Scores over HTTP, in the way that ``mode`` says."""

    def __init__(self) -> None:
        self.mode = "well"
        self._back = threading.Event()
        self._asked = 0
        self._server = self._open(0)
        self.port = self._server.server_port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, mode: str) -> None:
        """well, hang (no answer), error (500, every other time), busy (503), garbage, twice, gone."""
        if mode == "gone":
            self._close()
        elif self.mode == "gone":
            self._server = self._open(self.port)
        self.mode = mode
        if mode == "hang":
            self._back.clear()
        else:
            self._back.set()

    def close(self) -> None:
        self._back.set()
        if self.mode != "gone":
            self._close()

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _open(self, port: int) -> ThreadingHTTPServer:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.answer(self, evenness_of(body["tokens"]))

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The other side may be killed at any time."""

        server = Server(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def answer(self, handler: BaseHTTPRequestHandler, reward: float) -> None:
        self._asked += 1
        mode, body = self.mode, json.dumps({"reward": reward}).encode()
        if mode == "hang":
            self._back.wait(60)
        elif mode == "busy" or (mode == "error" and self._asked % 2):
            handler.send_error(503 if mode == "busy" else 500)
            return
        elif mode == "garbage" and self._asked % 2:
            body = b"<html>" * 50
        for _ in range(2 if mode == "twice" else 1):
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)


def evenness_of(tokens: Sequence[int]) -> float:
    """Something that a random model gets right by half."""
    return sum(token % 2 for token in tokens) / max(1, len(tokens))


def evenness(problem: Any, response: Any) -> float:  # noqa: ARG001
    """The same as ``reward.function``."""
    return evenness_of(response.tokens)


async def play(task: Any, model: Any, limits: Any) -> float:
    """An environment: three turns, whatever the model says, and a tool that takes its time."""
    messages: list[Any] = list(task.prompt)
    said = ""
    async with limits.agent():
        for turn in range(3):
            message = await model.chat(messages, max_tokens=6)
            said += str(message["content"])
            await asyncio.sleep(0.02 * (len(said) % 4))
            messages += [message, {"role": "user", "content": str(turn)}]
    return len(said) % 7 / 7


# Places that can become full


def enter_namespace() -> str:
    """Give this process mounts of its own, without privileges. Why not, if that cannot be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        return f"no namespace of its own ({os.strerror(ctypes.get_errno())})"
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        return f"no namespace of its own ({error.strerror})"
    libc.mount(None, b"/", None, PRIVATE, None)
    return ""


def mount_small(folder: Path, mib: int) -> str:
    """An empty file system in memory of this size; why not, if that cannot be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(parents=True, exist_ok=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={mib}m,mode=1777".encode()):
        return f"{folder} cannot be mounted ({os.strerror(ctypes.get_errno())})"
    return ""


def unmount(folder: Path) -> None:
    ctypes.CDLL(None).umount2(str(folder).encode(), DETACH)


class Ballast:
    """A file that takes all the room there is, until ``drop``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def fill(self) -> None:
        with self._path.open("wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)


def shared_segments() -> Iterator[str]:
    """Shared memory of runs, on this machine or in this namespace."""
    return (each.name for each in SHARED.glob("sf-*"))
