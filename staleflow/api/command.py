"""A command in a process of its own, with its output where this program's output goes.

    with caller_folder() as folder, Command(["train", "laptop"], folder) as command:
        while command.running(0.2): ...
        command.result()                    # StaleFlowError if it failed

On a terminal the command draws on it. Elsewhere, as in a notebook, its lines are passed on to ``sys.stdout``, which may
be something else than a file. Ctrl-C in a terminal reaches the command as well; in a notebook it is passed on.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from staleflow.caller import ERROR, VARIABLE
from staleflow.config import Config, ConfigError, load
from staleflow.errors import RunError, StaleFlowError, ending
from staleflow.readable import readable

LONGEST_PATH = 80
"""Of the folder: a socket in it has a limit of 108 bytes."""
STOP_S = 120.0
"""A command that was asked to end gets this long; then it is killed."""
PIECE = 1 << 16


@contextmanager
def caller_folder() -> Iterator[Path]:
    """What the command tells this program is written here (``staleflow.caller``)."""
    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="staleflow-", dir=place if len(place) < LONGEST_PATH else "/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def configuration(given: Config | str | os.PathLike[str] | None) -> Config | None:
    """What the first argument of ``train``, ``simulate``, ``compare`` and ``plan`` stands for."""
    if isinstance(given, str | os.PathLike):
        return load(given)
    if given is not None and not isinstance(given, Config):
        raise ConfigError(f"the configuration is a {type(given).__name__}: give sf.load(preset or file, changes)")
    return given


class Command:
    def __init__(self, words: Sequence[str], folder: Path, answer: bool = False) -> None:
        """``answer``: what it prints is kept as its answer, and only messages are passed on."""
        self._folder = folder
        self._answer = bytearray()
        terminal = _is_own(sys.stdout, 1) and sys.stdout.isatty()
        said = None if terminal else subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-m", "staleflow", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if answer else said,
            stderr=said if answer else None if terminal else subprocess.STDOUT,
            env=os.environ | {VARIABLE: str(folder), "PYTHONPATH": _path()},
            # In a terminal Ctrl-C reaches both; otherwise it is passed on, once.
            start_new_session=not terminal,
        )
        self._terminal = terminal
        self._open: dict[int, Callable[[bytes], None]] = {}
        if self._process.stdout is not None:
            self._open[self._process.stdout.fileno()] = self._keep if answer else self._show
        if self._process.stderr is not None:
            self._open[self._process.stderr.fileno()] = self._show

    def running(self, seconds: float) -> bool:
        """Pass on what it says, for as long as this at most. Whether it still runs."""
        if self._open:
            for descriptor in readable(list(self._open), seconds):
                if data := os.read(descriptor, PIECE):
                    self._open[descriptor](data)
                else:
                    del self._open[descriptor]
            return True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is None

    def interrupt(self) -> None:
        """Ask it to end in good order, if it has not been asked by the terminal."""
        if not self._terminal:
            self._send(signal.SIGINT)

    def stop(self) -> None:
        """Let it end in good order, and wait for that."""
        self._send(signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while time.monotonic() < until and self.running(0.2):
            pass

    def result(self) -> tuple[int, str]:
        """Its exit code and its answer. Raises what it failed of."""
        code = self._process.wait()
        told = self._folder / ERROR
        if told.is_file():
            raise _error(json.loads(told.read_text()))
        if code not in (0, 128 + signal.SIGINT):
            raise RunError(f"staleflow ended before its time ({ending(code)}): its messages say why")
        return code, self._answer.decode()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.stop()
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _keep(self, data: bytes) -> None:
        self._answer += data

    def _show(self, data: bytes) -> None:
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()


def _is_own(stream: Any, descriptor: int) -> bool:
    """Whether the stream is still what the process was started with."""
    try:
        return stream.fileno() == descriptor
    except (AttributeError, OSError, ValueError):
        return False


def _path() -> str:
    """Modules that this program finds, the command finds as well."""
    return os.pathsep.join(dict.fromkeys(each or os.getcwd() for each in sys.path))


def _error(told: Mapping[str, str]) -> StaleFlowError:
    """Of the class that it was of, where that is one of ours."""
    with suppress(ImportError, AttributeError):
        kind = getattr(importlib.import_module(told["module"]), told["name"])
        if isinstance(kind, type) and issubclass(kind, StaleFlowError):
            return kind(told["message"])
    return StaleFlowError(told["message"])
