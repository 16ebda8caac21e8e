"""What this machine has: a cache folder, cores, memory, GPUs. Nothing here loads PyTorch."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    """Cores that this process may use."""
    memory: int
    """Bytes that are available now, within the limits of the cgroup."""
    gpus: tuple[int, ...] = ()
    """Free bytes of each GPU."""
    shared: int | None = None
    """Free bytes of shared memory; None: no limit of its own."""


def cache_folder() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(base) / "staleflow")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine() -> Machine:
    return Machine(cores(), free_memory(), _gpus(), _shared())


def free_memory() -> int:
    """Available bytes, or what the cgroup still allows if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = [limit - used for limit, used in _groups()]
    return max(0, min(free, *left)) if left else free


def _shared(folder: str = "/dev/shm") -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """(limit, used) of the cgroups of this process, version 2 or 1, that have a limit."""
    files: list[tuple[Path, Path]] = [
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        folder = root / line.rpartition(":")[2].lstrip("/")
        files.append((folder / "memory.max", folder / "memory.current"))
    found: list[tuple[int, int]] = []
    for limit, used in files:
        try:
            pair = int(limit.read_text()), int(used.read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if pair[0] < 2**60:
            found.append(pair)
    return found


def _gpus() -> tuple[int, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return _visible(text, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _visible(text: str, only: str | None) -> tuple[int, ...]:
    """Free bytes of the GPUs that CUDA sees, in its order; ``only`` has their numbers or names."""
    free: dict[str, int] = {}
    for line in filter(str.strip, text.splitlines()):
        index, name, megabytes = (part.strip() for part in line.split(","))
        free[index] = free[name] = int(megabytes) * 2**20
    if only is None:
        return tuple(size for index, size in free.items() if index.isdigit())
    return tuple(free[each.strip()] for each in only.split(",") if each.strip() in free)
