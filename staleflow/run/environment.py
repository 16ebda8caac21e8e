"""``environment.json``: what a run was made with and how it was started, for those who want to make it again.

write_environment(directory, ["staleflow", "train", "laptop"])
read_environment(directory)["packages"]["torch"]        # {} if the run has none
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from staleflow.run.directory import RunDirectory

PACKAGES = (
    "staleflow", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "msgspec", "triton", "vllm",
    "ray", "datasets", "math-verify", "reasoning-gym",
)  # fmt: skip
"""Whose versions may change what is trained."""


def environment(command: Sequence[str]) -> dict[str, Any]:
    packages: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "command": list(command),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": packages,
    }


def write_environment(directory: RunDirectory, command: Sequence[str]) -> None:
    """Once, when the run is new; nothing is lost but this if it cannot be written."""
    with suppress(OSError):
        directory.write(directory.environment, environment(command))


def read_environment(directory: RunDirectory) -> dict[str, Any]:
    try:
        found = json.loads(directory.environment.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
