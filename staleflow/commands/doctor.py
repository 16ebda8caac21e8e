"""``staleflow doctor``: what this machine has, and what would keep a run from working here.

staleflow doctor            the exit code is 1 if nothing can be trained here
staleflow doctor --json

Every finding has a fix. Nothing is changed or started, except that packages are imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from staleflow import __version__
from staleflow.commands.common import Subparsers
from staleflow.config import Config
from staleflow.config.machine import Machine, this_machine
from staleflow.config.memory import gigabytes
from staleflow.config.ray import INSTALL
from staleflow.rollout.options import ENGINES
from staleflow.tasks import smollm

NEEDED = {"torch": "local", "transformers": "local", "safetensors": "local", "tokenizers": "local", "xxhash": "local"}
OPTIONAL = {
    "peft": "local",
    "datasets": "tasks",
    "math-verify": "tasks",
    "ray": "ray",
    "trl": "bench",
}
"""By distribution: the extra that has it."""
FOR_SMOLLM = ("gguf", smollm.PACKAGE)
"""What presets with SmolLM2-135M need, such as ``one-gpu``. One line installs both."""
LEAST_MEMORY, LEAST_SHARED, LEAST_DISK, LEAST_FILES = 2 << 30, 256 << 20, 1 << 30, 256
"""What the preset ``laptop`` needs, about."""


class Finding(NamedTuple):
    grave: bool
    """Nothing can be trained with it."""
    what: str
    fix: str


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("doctor", help="what this machine has, and what is missing", allow_abbrev=False)
    parser.add_argument("--runs", type=Path, default=Path(Config().runs), help="where run directories would be")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    facts = examined(options.runs)
    print(json.dumps(facts) if options.json else "\n".join(lines(facts)))
    return 0 if facts["ok"] else 1


def examined(runs: Path) -> dict[str, Any]:
    """Facts by topic, and what is wrong with them."""
    machine = this_machine()
    hardware = {
        "system": platform.platform(),
        "cores": machine.cores,
        "memory_bytes": machine.memory,
        "gpus_free_bytes": list(machine.gpus),
    }
    packages = {name: _version(name) for name in (*NEEDED, *OPTIONAL, *FOR_SMOLLM)}
    engines = {name: _engine(name) for name in ENGINES.entries}
    limits = {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "address_space_bytes": _unlimited(resource.getrlimit(resource.RLIMIT_AS)[0]),
        "disk_free_bytes": _disk(runs),
    }
    findings = [*_missing(packages), *_narrow(machine, limits, runs), *_idle_engines(engines)]
    return {
        "ok": not any(each.grave for each in findings),
        "staleflow": __version__,
        "python": platform.python_version(),
        "hardware": hardware,
        "packages": packages,
        "engines": engines,
        "ray": _ray(),
        "limits": limits,
        "shared_memory": {"free_bytes": machine.shared},
        "findings": [each._asdict() for each in findings],
    }


def lines(facts: dict[str, Any]) -> Iterator[str]:
    hardware, limits, shared = facts["hardware"], facts["limits"], facts["shared_memory"]["free_bytes"]
    gpus = ", ".join(gigabytes(each) + " free" for each in hardware["gpus_free_bytes"]) or "none"
    yield f"StaleFlow {facts['staleflow']}, Python {facts['python']}, {hardware['system']}"
    yield f"cores          {hardware['cores']}"
    yield f"memory         {gigabytes(hardware['memory_bytes'])} available"
    yield f"shared memory  {'as much as memory' if shared is None else gigabytes(shared) + ' free'}"
    yield f"disk           {gigabytes(limits['disk_free_bytes'])} free"
    yield f"open files     {limits['open_files']}"
    yield f"GPUs           {gpus}"
    yield "packages       " + ", ".join(f"{name} {found}" for name, found in facts["packages"].items() if found)
    for name, engine in facts["engines"].items():
        yield f"engine         {name}: {'works' if engine['works'] else engine['why']}"
    if facts["packages"]["ray"]:
        yield f"runtime        ray: {'works' if facts['ray']['works'] else facts['ray']['why']}"
    for each in facts["findings"]:
        yield f"{'ERROR' if each['grave'] else 'note'}: {each['what']}: {each['fix']}"
    yield "everything that is needed is here" if facts["ok"] else "nothing can be trained here yet"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engine(name: str) -> dict[str, Any]:
    """Whether it can be loaded."""
    try:
        ENGINES.check(name, {})
        ENGINES.load(name)
    except Exception as error:  # whatever an installation of somebody else's package may raise
        return {"works": False, "why": " ".join(str(error).split())}
    return {"works": True, "why": ""}


def _ray() -> dict[str, Any]:
    """Whether ``runtime=ray`` can be used. No cluster is started or joined."""
    if _version("ray") is None:
        return {"works": False, "why": f"not installed: {INSTALL}"}
    try:
        importlib.import_module("ray")
    except Exception as error:  # of somebody else's installation
        return {"works": False, "why": " ".join(str(error).split())}
    return {"works": True, "why": ""}


def _missing(packages: dict[str, str | None]) -> Iterator[Finding]:
    for name, extra in (NEEDED | OPTIONAL).items():
        if packages[name] is None:
            yield Finding(name in NEEDED, f"{name} is not installed", f"pip install 'staleflow[{extra}]'")
    for name in FOR_SMOLLM:
        if packages[name] is None:
            yield Finding(False, f"{name} is not installed", smollm.INSTALL)


def _narrow(machine: Machine, limits: dict[str, Any], runs: Path) -> Iterator[Finding]:
    if machine.memory < LEAST_MEMORY:
        yield Finding(True, f"only {gigabytes(machine.memory)} of memory are available", "end something else")
    if machine.shared is not None and machine.shared < LEAST_SHARED:
        what = f"only {gigabytes(machine.shared)} of shared memory are free"
        yield Finding(machine.shared < LEAST_SHARED // 4, what, "staleflow clean, or docker run --shm-size=8g")
    if limits["disk_free_bytes"] < LEAST_DISK:
        what = f"only {gigabytes(limits['disk_free_bytes'])} are free on the disk of {runs}"
        yield Finding(False, what, "make room, or give another folder by runs=...")
    if limits["open_files"] < LEAST_FILES:
        yield Finding(True, f"a process may open only {limits['open_files']} files", "ulimit -n 4096")
    if not (place := _existing(runs, Path.exists)).is_dir():
        yield Finding(True, f"{place} is not a folder", "give another folder by runs=...")
    elif not os.access(place, os.W_OK):
        yield Finding(True, f"{runs} cannot be written", "make it writable, or give another folder by runs=...")
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "").strip()
    if machine.gpus and _mps() and share not in ("", "100", "100.0"):
        what = f"CUDA's Multi-Process Service gives a process {share} % of a GPU: matrix products can be wrong then"
        yield Finding(False, what, "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if not sys.platform.startswith("linux"):
        what = f"{platform.system()} is not tested, and runs do not take over in place after a crash there"
        yield Finding(False, what, "use Linux where that matters")


def _idle_engines(engines: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    if not any(each["works"] for each in engines.values()):
        yield Finding(True, "no engine works", "see the lines about engines")


def _mps() -> bool:
    """Whether processes share a GPU by CUDA's Multi-Process Service: its daemon listens here."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _disk(runs: Path) -> int:
    return shutil.disk_usage(_existing(runs)).free


def _existing(path: Path, exists: Callable[[Path], bool] = Path.is_dir) -> Path:
    """The folder, or the nearest above it that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if exists(each))


def _unlimited(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
