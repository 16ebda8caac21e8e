"""Shared memory segments, and the registry of the stores that they belong to.

A store is a control file in the registry folder and a few POSIX shared memory segments that the file names. Whoever
uses the store holds a shared ``flock`` on the file, its writer an exclusive one on a second file beside it. The kernel
drops both when a process dies, however it dies: so a store that nobody holds is a leftover, and ``reclaim`` removes it
and its memory without touching what another live run uses. A live run may have a store that nobody holds for a moment,
when its trainer has died and no instance is attached: so it claims the name until it ends.

    registry = StoreRegistry(None)         # per user, in shared memory like the segments themselves
    with registry.locked():                # while stores appear, are joined or go
        registry.reclaim(read_segments)    # names of the stores that were left over
"""

import contextlib
import errno
import fcntl
import importlib
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from staleflow.errors import StaleFlowError

_shm: Any = importlib.import_module("_posixshmem")
"""The base of ``multiprocessing.shared_memory``; used directly, because the resource tracker of the latter removes
segments when the process that made them dies, and ours must outlive it."""
SHM_FOLDER = "/dev/shm"
"""Where Linux mounts shared memory. Elsewhere a lack of room shows when memory is allocated."""
LOCK_WAIT_S = 30.0
"""Limit of the wait for the registry lock. It is held for milliseconds; freeing a large leftover takes longest."""


class WeightsError(StaleFlowError, ValueError):
    """Weights cannot be stored or loaded; the message says what to do. What was published stays as it was."""


class BusyStoreError(WeightsError):
    """Another process writes to the store."""


class NoStoreError(WeightsError):
    """Nobody has created a store of this name here, or it was removed."""


# Segments


def create_segment(name: str, size: int) -> mmap.mmap:
    """A new segment with all its pages allocated and mapped.

    So a full machine gives an error now and not a SIGBUS in the middle of a copy, and no push or pull pays for first
    touches."""
    ensure_room(size)
    fd: int = _shm.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        return _map(fd, size)
    except OSError as error:
        unlink_segment(name)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise no_room(size, None) from error
        raise
    except BaseException:
        unlink_segment(name)
        raise
    finally:
        os.close(fd)


def attach_segment(name: str) -> mmap.mmap | None:
    """The segment, or None if it is gone."""
    try:
        fd: int = _shm.shm_open(name, os.O_RDWR, 0o600)
    except FileNotFoundError:
        return None
    try:
        return _map(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def unlink_segment(name: str) -> bool:
    """Remove the name; the memory goes when the last process unmaps it. Returns whether there was such a segment."""
    try:
        _shm.shm_unlink(name)
    except FileNotFoundError:
        return False
    return True


def ensure_room(size: int) -> None:
    try:
        room = os.statvfs(SHM_FOLDER)
    except OSError:
        return
    free = room.f_bavail * room.f_frsize
    if free < size:
        raise no_room(size, free)


def no_room(size: int, free: int | None) -> WeightsError:
    has = "less" if free is None else f"{free / 2**20:,.0f} MiB"
    return WeightsError(
        f"not enough shared memory for the weights: {size / 2**20:,.0f} MiB are needed and {has} are free: enlarge it "
        f"(mount -o remount,size=... {SHM_FOLDER}, or docker run --shm-size=...), or publish in a smaller dtype"
    )


def _map(fd: int, size: int) -> mmap.mmap:
    return mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


# Processes


def start_time(pid: int) -> int | None:
    """When the process started, in the kernel's ticks; 0 if it is alive and that is unknown; None if it is dead.

    Together with the pid this identifies a process: the next one with the same pid has another start."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _alive(pid)
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _alive(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return 0


# The registry

SegmentsOf = Callable[[bytes], list[str] | None]
"""Reads the segments' names from a control file's bytes; None if it cannot know them."""


def _common_folder() -> Path:
    """The folder of the segments, if there is one: visible to the same processes, and gone with them."""
    shared = os.access(SHM_FOLDER, os.W_OK | os.X_OK)
    return Path(SHM_FOLDER if shared else tempfile.gettempdir()) / f"staleflow-{os.getuid()}"


class StoreRegistry:
    """One folder per user, with a few small files for each store and a lock for creating, joining and removing them."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder or _common_folder())
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.folder.stat().st_uid
        except OSError as error:
            raise self._unusable(error.strerror) from error
        if owner != os.getuid():
            raise self._unusable(f"it belongs to user {owner}")

    def control(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise WeightsError(f"{name!r} cannot name a weights store: use letters, digits, '.', '_' and '-'")
        return self.folder / f"{name}.weights"

    def writer(self, name: str) -> Path:
        return self.control(name).with_suffix(".writer")

    def claimed(self, name: str) -> Path:
        return self.control(name).with_suffix(".claim")

    def claim(self, name: str) -> int:
        """Keep the store from being a leftover until ``disclaim`` of what this returns, or the end of this process."""
        with self.locked():
            fd = self.open(self.claimed(name), create=True)
            if hold(fd, fcntl.LOCK_EX):
                return fd
        os.close(fd)
        raise WeightsError(f"weights store {name!r} belongs to a live run: stop that first")

    def disclaim(self, name: str, fd: int) -> None:
        with self.locked():
            self.claimed(name).unlink(missing_ok=True)
            let_go(fd)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock under which stores are created, joined and reclaimed. A process that dies releases it."""
        fd = self.open(self.folder / "lock", create=True)
        try:
            deadline = time.monotonic() + LOCK_WAIT_S
            while not hold(fd, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise WeightsError(
                        f"{self.folder / 'lock'} has been held for {LOCK_WAIT_S:g} s: is a process that uses weights "
                        "stopped? continue or kill it"
                    )
                time.sleep(0.002)
            yield
        finally:
            let_go(fd)

    def open(self, path: Path, create: bool = False) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unusable(error.strerror) from error

    def reclaim(self, segments_of: SegmentsOf) -> list[str]:
        """Remove the stores that nobody holds, and their memory. Call it with the registry locked."""
        gone: list[str] = []
        for name, segments in self.leftovers(segments_of):
            self.remove(name, segments)
            gone.append(name)
        for claim in self.folder.glob("*.claim"):
            if self.free(claim):
                claim.unlink()
        return gone

    def leftovers(self, segments_of: SegmentsOf) -> Iterator[tuple[str, list[str]]]:
        """Name and segments of each store that nobody holds, and that nobody can join until the next is asked for."""
        for control in sorted(self.folder.glob("*.weights")):
            fd = self.open(control)
            try:
                if hold(fd, fcntl.LOCK_EX) and self.free(control.with_suffix(".claim")):
                    segments = segments_of(control.read_bytes())
                    if segments is not None:
                        yield control.stem, segments
            finally:
                os.close(fd)

    def free(self, path: Path) -> bool:
        """Whether no process holds the file, or there is none."""
        try:
            fd = self.open(path)
        except FileNotFoundError:
            return True
        try:
            return hold(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)

    def remove(self, name: str, segments: list[str]) -> None:
        """Remove segments and files. Segments first: a death in between leaves the file that names the rest."""
        for segment in segments:
            unlink_segment(segment)
        self.writer(name).unlink(missing_ok=True)
        self.control(name).unlink(missing_ok=True)

    def _unusable(self, why: str | None) -> WeightsError:
        return WeightsError(
            f"the weights registry {self.folder} cannot be used ({why}): make it a writable folder of your own, or "
            "pass another one as registry"
        )


def let_go(fd: int) -> None:
    """Unlock, then close: a process forked meanwhile has the file open, and closing it here would leave it locked."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def hold(fd: int, kind: int) -> bool:
    """Take the lock if it is free. It lasts until the file is closed or the process dies."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
