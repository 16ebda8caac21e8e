"""What dead runs left on this machine: processes, shared memory, half-written checkpoints and models; never what a live
one uses.

    for each in leftovers(Path("runs"), Path("cache"), remove=False): print(each.kind, each.name, each.bytes)

A new run reclaims the shared memory of dead ones by itself. Whether a process is alive is known from locks, which the
kernel drops when it dies; for segments without a record, from the processes that have them mapped.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from staleflow.errors import RunError
from staleflow.run.directory import RunDirectory
from staleflow.run.processes import end, processes, supervised
from staleflow.servers.weights.segments import SHM_FOLDER, StoreRegistry, unlink_segment
from staleflow.servers.weights.slots import segments_of
from staleflow.tasks.folders import abandoned
from staleflow.training.checksums import REMOVED, REPLACED, UNFINISHED

SEGMENTS = "sf-*"


class Leftover(NamedTuple):
    kind: str
    name: str
    bytes: int


def leftovers(
    runs: Path, cache: Path, remove: bool, registry: StoreRegistry | None = None, shared: Path = Path(SHM_FOLDER)
) -> list[Leftover]:
    """All of them, and if ``remove`` they are gone after that. ``runs`` and ``cache``: the settings of these names."""
    registry = registry or StoreRegistry(None)
    found = list(_processes(runs, remove))
    with registry.locked():
        found += _stores(registry, shared, remove)
        found += _segments(registry, shared, remove)
    return [*found, *_sockets(registry, remove), *_drafts(runs, remove), *_models(cache, remove)]


def _processes(runs: Path, remove: bool) -> Iterator[Leftover]:
    """Those of runs in this folder that wait for a control plane, unless somebody is about to start one."""
    for each in list(processes()):
        if each.run.parent != runs.resolve() or _owned(each.run) or supervised(each):
            continue
        with suppress(OSError):
            pages = int(Path(f"/proc/{each.pid}/statm").read_text().split()[1])
            yield Leftover("process", f"{each.pid}, {each.name} of {each.run}", pages * os.sysconf("SC_PAGE_SIZE"))
            if remove:
                end([each])


def _owned(run: Path) -> bool:
    if not run.is_dir():
        return False
    try:
        with RunDirectory(run).owned():
            return False
    except RunError:
        return True


def _sockets(registry: StoreRegistry, remove: bool) -> Iterator[Leftover]:
    """At which nobody listens."""
    for path in sorted(registry.folder.glob("*.sock")):
        with socket.socket(socket.AF_UNIX) as end, suppress(FileNotFoundError):
            try:
                end.connect(str(path))
            except ConnectionRefusedError:
                yield Leftover("socket", str(path), 0)
                if remove:
                    path.unlink(missing_ok=True)


def _stores(registry: StoreRegistry, shared: Path, remove: bool) -> Iterator[Leftover]:
    """Of runs that have a record: the weights, and what a trainer's replacement would need."""
    for name, segments in registry.leftovers(segments_of):
        yield Leftover("shared memory", name, sum(_size(shared / each.lstrip("/")) for each in segments))
        if remove:
            registry.remove(name, segments)


def _segments(registry: StoreRegistry, shared: Path, remove: bool) -> Iterator[Leftover]:
    """Without a record: that was deleted."""
    known = {each for control in registry.folder.glob("*.weights") for each in segments_of(control.read_bytes()) or ()}
    used = _used(shared)
    for path in sorted(shared.glob(SEGMENTS)):
        with suppress(FileNotFoundError):
            if f"/{path.name}" not in known and str(path) not in used and path.stat().st_uid == os.getuid():
                yield Leftover("shared memory", path.name, _size(path))
                if remove:
                    unlink_segment(f"/{path.name}")


def _used(shared: Path) -> set[str]:
    """Files of shared memory that a process has open or mapped. Processes of other users cannot use ours."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found |= {os.readlink(each) for each in (process / "fd").iterdir()}
            lines = (process / "maps").read_text(errors="replace").splitlines()
            found |= {line[line.index("/") :] for line in lines if str(shared) in line}
    return found


def _drafts(runs: Path, remove: bool) -> Iterator[Leftover]:
    """Checkpoints that were being written or removed."""
    for lock in sorted(runs.glob("*/lock")):
        with suppress(RunError), RunDirectory(lock.parent).owned() as run:
            for path in (
                each for start in (UNFINISHED, REPLACED, REMOVED) for each in run.checkpoints.glob(f"{start}*")
            ):
                yield Leftover("checkpoint", str(path), _size(path))
                if remove:
                    shutil.rmtree(path, ignore_errors=True)


def _models(cache: Path, remove: bool) -> Iterator[Leftover]:
    for path in abandoned(cache):
        yield Leftover("model", str(path), _size(path))
        if remove:
            shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    """Bytes on the disk or in memory; 0 if it is gone."""
    with suppress(FileNotFoundError):
        return sum(each.lstat().st_size for each in (path, *path.rglob("*")) if not each.is_dir())
    return 0
