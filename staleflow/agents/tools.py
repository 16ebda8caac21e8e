"""Tools in processes of their own, with limits of time, memory and output. ::

    done = await run(["python3", "-I", "-c", code], limits=ToolLimits(seconds=5, memory_mib=256))
    done.output, done.code, done.why        # why: "" or the limit that ended it

A tool starts in an empty folder that is removed afterwards, with a small environment, and is killed with everything
that it started when it is over its time, when the episode is cancelled, and when its worker ends.

Limited: wall time, processor time, address space (of each process), size of files, output that is kept. **Not
isolated**: the network, and every file that this user may read or write; how many processes it starts. Code that you do
not trust belongs in a container or a virtual machine, whose client the tool then is.
"""

import asyncio
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from staleflow.errors import ending

PASSED = ("PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables that a tool sees."""
LAUNCH = """
import os, resource, sys
for name, value in zip(("RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_CPU", "RLIMIT_CORE"), map(int, sys.argv[1:5])):
    resource.setrlimit(getattr(resource, name), (value, value))
os.execvp(sys.argv[5], sys.argv[5:])
"""
PIECE = 1 << 16
GONE_S = 10.0
"""How long killed processes may take to be gone."""
GONE_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """None: no limit."""

    seconds: float | None = 10.0
    """Wall time, and processor time of each process."""
    memory_mib: int | None = 1024
    """Address space of each process."""
    file_mib: int | None = 64
    """The largest file that it writes."""
    output_bytes: int = 1 << 16
    """Of its output that is kept; the rest is read and dropped."""


class Done(NamedTuple):
    output: str
    """Standard output and standard error, as they came."""
    code: int
    """Exit status; negative: the signal that ended it."""
    why: str = ""
    """Why it ended, if not with exit code 0."""


NORMAL = ToolLimits()


async def run(
    command: Sequence[str],
    given: str = "",
    limits: ToolLimits = NORMAL,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Done:
    """The command with ``given`` as its standard input. ``environment``: further variables that it sees. ``folder``: in
    which it starts; None: an empty one."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    sizes = [-1 if each is None else each << 20 for each in (limits.memory_mib, limits.file_mib)]
    sizes += [-1 if limits.seconds is None else math.ceil(limits.seconds), 0]
    with tempfile.TemporaryDirectory(prefix="tool-", ignore_cleanup_errors=True) as empty:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", LAUNCH, *map(str, sizes), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder or empty,
            env={**passed, "HOME": empty, "TMPDIR": empty, **(environment or {})},
            start_new_session=True,
        )
        output, late = "", False
        try:
            async with asyncio.timeout(limits.seconds):
                output = await _talk(process, given, limits.output_bytes)
        except TimeoutError:
            late = True
        finally:
            killed = kill_tree(process.pid)
            code = await asyncio.shield(process.wait())
            await asyncio.shield(gone(killed))
    why = f"took more than {limits.seconds:g} s" if late else "" if code == 0 else ending(code)
    return Done(output, code, why)


async def _talk(process: asyncio.subprocess.Process, given: str, most: int) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    writing = asyncio.ensure_future(_write(process.stdin, given.encode()))
    try:
        kept = bytearray()
        while piece := await process.stdout.read(PIECE):
            kept += piece[: most - len(kept)]
        await process.wait()
        return kept.decode(errors="replace")
    finally:
        writing.cancel()


async def _write(into: asyncio.StreamWriter, given: bytes) -> None:
    with suppress(ConnectionError):  # it need not read all
        into.write(given)
        await into.drain()
    into.close()


def kill_tree(pid: int, itself: bool = True) -> list[int]:
    """Kill a process and all that it has started, whatever sessions and groups they have made.

    Returns whom: a signal was sent, and on a busy machine they live on for a moment (see ``gone``).
    """
    frozen: list[int] = []
    if itself:
        _signal(pid, signal.SIGSTOP)  # so that it starts nothing more meanwhile
    while new := [each for each in descendants(pid) if each not in frozen]:
        for each in new:
            _signal(each, signal.SIGSTOP)
        frozen += new
    killed = [*frozen, *([pid] if itself else [])]
    for each in killed:
        _signal(each, signal.SIGKILL)
    return killed


async def gone(killed: list[int]) -> None:
    """Wait until killed processes no longer run, so that what they held is free."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GONE_S):
            while any(_state(each) not in "ZX" for each in killed):
                await asyncio.sleep(GONE_LOOK_S)


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on. Only where there is ``/proc``."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:  # grows meanwhile
        found += children.get(each, ())
    return found


def _state(pid: int) -> str:
    """A letter; X: dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
