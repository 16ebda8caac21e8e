"""Reward workers for functions that no other process can import: a lambda, a closure, a function of a notebook.

``Forks`` forks the program that has them, once, before anything heavy happens. This fork does nothing but fork again,
a worker for each connection to its socket; so workers have the functions with everything they refer to, and nothing
is pickled::

    with Forks({"correct": lambda problem, response: 1.0}, folder / "rewards"):
        ...                                             # in any process:
        sock = connect(folder / "rewards", options, decoder, stderr=2)

A worker is killed, with everything that it started, when its connection is closed from the other side; all of them,
and the fork, when the program ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

import msgspec

from staleflow.caller import REWARDS, in_folder
from staleflow.errors import ConfigError
from staleflow.frames import Frames, framed
from staleflow.reward.environment import environment
from staleflow.reward.options import PYTHON, Reward
from staleflow.reward.worker import serve

MOST_BYTES = 1 << 24
"""Of the options."""
WAITING = 64
"""Connections that may wait to be accepted."""


class Forks:
    def __init__(self, functions: Mapping[str, Callable[..., Any]], path: Path) -> None:
        """``path``: of the socket, at most about 100 bytes long."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(WAITING)
            ended, self._alive = os.pipe()  # ends with this process, however that ends
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # whatever a notebook has put there
                    stream.flush()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads, of which the fork has none
                self._pid = os.fork()
            if self._pid == 0:
                os.close(self._alive)
                _fork_for_each(listener, ended, functions)
            os.close(ended)

    def close(self) -> None:
        """End the fork and all workers. May be called again."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
            os.waitpid(self._pid, 0)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        self.close()


def own_functions(options: Reward) -> Path | None:
    """The socket of the program whose functions are asked for; None if none of them are a program's own."""
    if not (own := [each for each in options.functions if each.startswith(PYTHON)]):
        return None
    if (path := in_folder(REWARDS)) is None or not path.exists():
        name = own[0].removeprefix(PYTHON)
        raise ConfigError(
            f"reward.function={own[0]} is a function of the program that started the run: continue there, with "
            f"staleflow.train(..., reward={name}, resume=...)"
        )
    return path


def connect(path: Path, options: Reward, decoder: str, stderr: int | None) -> socket.socket:
    """A new worker, at the other end of the connection; it speaks as those of ``worker.py`` do."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        socket.send_fds(connection, [b"\0"], [2 if stderr is None else stderr])
        connection.sendall(framed((msgspec.json.encode(options).decode(), decoder), MOST_BYTES))
    except BaseException:
        connection.close()
        raise
    return connection


# In the fork


def _fork_for_each(listener: socket.socket, ended: int, functions: Mapping[str, Callable[..., Any]]) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C is for the program
        signal.set_wakeup_fd(-1)  # an event loop of the program would be woken up otherwise
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(each, signal.SIG_DFL)
        _Workers(listener, ended, functions).run()
    finally:
        os._exit(0)


class _Workers:
    def __init__(self, listener: socket.socket, ended: int, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._listener = listener
        self._ended = ended
        self._functions = functions
        self._workers: dict[int, tuple[socket.socket, int, int]] = {}
        """By the descriptors of its connection and of its process: (connection, process, descriptor of that)."""
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(ended, select.POLLIN)

    def run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._ended:
                    for each in self._all():
                        self._end(*each)
                    return
                if descriptor == self._listener.fileno():
                    self._start(self._listener.accept()[0])
                elif descriptor in self._workers:  # its pool has hung up, or it has died
                    self._end(*self._workers[descriptor])

    def _all(self) -> list[tuple[socket.socket, int, int]]:
        return list({each[1]: each for each in self._workers.values()}.values())

    def _start(self, connection: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self._work(connection)
        process = os.pidfd_open(pid)
        self._workers[connection.fileno()] = self._workers[process] = (connection, pid, process)
        self._poll.register(connection, 0)  # its end is reported all the same
        self._poll.register(process, select.POLLIN)

    def _end(self, connection: socket.socket, pid: int, process: int) -> None:
        for each in (connection.fileno(), process):
            self._poll.unregister(each)
            self._workers.pop(each, None)
        for kill in (os.killpg, os.kill):  # it may not have a group of its own yet
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(process)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _work(self, connection: socket.socket) -> NoReturn:
        try:
            os.setsid()  # so that what the function starts can be killed with it
            self._listener.close()
            os.close(self._ended)
            for other, _, process in self._all():
                other.close()
                os.close(process)
            _, (stderr, *_), _, _ = socket.recv_fds(connection, 1, 1)
            os.dup2(stderr, 2)
            os.close(stderr)
            sys.stdout = sys.stderr = _log()  # a notebook's would go elsewhere
            options, decoder = _first(connection)
            seen = environment(options.environment)
            os.environ.clear()
            os.environ.update(seen)
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(1)  # threads of the program are not here, though its pool of them says so
            serve(connection.fileno(), connection.fileno(), options, decoder, self._functions)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _log() -> TextIO:
    """Standard error, as a program has it: whatever is printed there, it is no error."""
    return os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _first(connection: socket.socket) -> tuple[Reward, str]:
    frames: Frames[tuple[str, str]] = Frames(tuple[str, str], MOST_BYTES)
    while data := connection.recv(1 << 16):
        for options, decoder in frames.feed(data):
            return msgspec.json.decode(options, type=Reward), decoder
    raise ConnectionError("the pool has gone")
