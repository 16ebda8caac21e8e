"""Processes of dead attempts: what is said to be gone holds nothing any more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from staleflow.run import processes
from staleflow.run.processes import Process
from staleflow.servers.weights.segments import StoreRegistry

pytestmark = pytest.mark.processes

DYING = """
import ctypes, fcntl, os, sys, threading
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
stays = threading.Event()
threading.Thread(target=stays.wait).start()
print("holds it", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
"""Its first thread ends, and another still has the files: as of a killed one that the kernel has not done with."""


def test_a_trainer_that_has_no_command_line_any_more_does_not_keep_the_lock_that_its_successor_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run was resumed before its processes were gone: its new trainer was refused by a store that was in use."""
    registry = StoreRegistry(tmp_path / "registry")
    lock = registry.writer("w")
    words = [sys.executable, "-c", DYING, str(lock)]
    with subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"holds it\n"
        until = time.monotonic() + 60
        while Path(f"/proc/{dying.pid}/cmdline").read_bytes():
            assert time.monotonic() < until, "its first thread has not ended"

        def kill(group: int, _number: int) -> None:
            killed.append(group)

        def wait(_seconds: float) -> None:
            """The kernel takes its time."""
            waited.append(registry.free(lock))
            os.kill(dying.pid, signal.SIGKILL)
            dying.wait()

        killed, waited = list[int](), list[bool]()
        monkeypatch.setattr(processes.os, "killpg", kill)
        monkeypatch.setattr(processes.time, "sleep", wait)
        try:
            processes.end([Process("trainer", 1, dying.pid, os.getpid(), tmp_path)])
            assert (killed, waited) == ([dying.pid], [False])
            assert registry.free(lock)
        finally:
            dying.kill()
