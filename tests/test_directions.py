"""Packages import only what lies below them: otherwise a change in one room is felt in all of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import staleflow

ROOT = Path(staleflow.__path__[0])
BELOW: dict[str, tuple[str, ...]] = {
    "errors": (),
    "frames": (),
    "readable": (),
    "files": (),
    "types": (),
    "sound_gpu": (),
    "tcp": ("files",),
    "caller": ("files",),
    "registry": ("errors",),
    "settings": ("errors", "registry"),
    "model_json": ("errors",),
    "protocol": ("errors", "types"),
    "coordinator": ("errors", "types", "registry", "settings", "protocol"),
    "servers": ("errors", "types", "files", "tcp", "registry", "protocol"),
    "tasks": ("errors", "types", "files", "registry", "settings", "model_json", "servers"),
    "reward": ("errors", "types", "caller", "registry", "settings", "frames", "servers", "tasks"),
    "rollout": (
        "errors",
        "types",
        "files",
        "registry",
        "settings",
        "model_json",
        "sound_gpu",
        "coordinator",
        "servers",
    ),
    "training": ("errors", "types", "files", "registry", "settings", "model_json", "sound_gpu", "servers"),
    "agents": ("errors", "types", "registry", "settings", "frames", "model_json", "tasks", "reward", "rollout"),
    "config": (
        "errors",
        "files",
        "registry",
        "settings",
        "model_json",
        "coordinator",
        "servers",
        "tasks",
        "reward",
        "rollout",
        "training",
        "agents",
    ),
    "observe": ("errors", "types", "files"),
}
"""By package, what it may import besides itself; further up everything below is allowed, in this order:"""
ABOVE = ("workers", "run", "runtime", "simulate", "study", "dash", "commands", "api", "cli", "__main__", "__init__")


def allowed(package: str) -> set[str]:
    if package in BELOW:
        return {package, *BELOW[package]}
    return {*BELOW, *ABOVE[: ABOVE.index(package) + 1]}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Packages of this project that a file names, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if (
                parts[0] == "staleflow"
                and len(parts) > 1
                and (ROOT / parts[1]).exists() | (ROOT / f"{parts[1]}.py").exists()
            ):
                yield parts[1]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_package_imports_only_what_lies_below_it(path: Path) -> None:
    package = package_of(path)
    wrong = set(imported(ast.parse(path.read_text()))) - allowed(package)
    assert not wrong, f"{package} must not import {', '.join(sorted(wrong))}"
