"""Control code asks for time, chance and order from outside: otherwise a seed would not repeat a run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import staleflow

ROOT = Path(staleflow.__path__[0])
EFFECTS = (
    "runtime/local/",
    "runtime/ray/",
    "servers/database.py",
    "servers/durable.py",
    "servers/payload_files.py",
    "servers/weights/",
)
"""What reaches the disk, shared memory and other processes; control code sees it through the ``Journal`` protocol and
the ports."""
FILES = sorted(
    path
    for part in ("runtime", "servers", "coordinator", "protocol")
    for path in ROOT.glob(f"{part}/**/*.py")
    if not path.relative_to(ROOT).as_posix().startswith(EFFECTS)
)
IMPORTS = {"time", "datetime", "random", "secrets", "uuid", "threading", "multiprocessing", "staleflow.simulate"}
CALLS = {"hash", "id", "os.urandom", "asyncio.get_event_loop", "np.random", "numpy.random"}
CHANGES = {"reserve", "lower", "renew", "occupy", "release", "take", "consume", "commit", "rollback", "pop", "append"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(tree: ast.AST) -> Iterator[str]:
    """Every dotted name, and every plain name that is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def within(name: str, forbidden: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in forbidden)


def impurities(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [name for name in imported(tree) if within(name, IMPORTS | CALLS)]
    return found + [name for name in used(tree) if within(name, CALLS)]


def test_there_is_control_code_to_look_at() -> None:
    assert len(FILES) > 15


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_control_code_reads_no_wall_clock_and_draws_no_random_number(path: Path) -> None:
    assert impurities(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import numpy.random",
        "import random as r",
        "from os import urandom",
        "from staleflow.simulate.clock import VirtualLoop",
        "from staleflow import simulate",
        "from asyncio import get_event_loop",
        "asyncio.get_event_loop().time()",
        "os.urandom(8)",
        "np.random.default_rng()",
        "sorted(groups, key=lambda group: hash(group))",
        "id(group)",
    ],
)
def test_the_check_itself_overlooks_nothing(source: str) -> None:
    assert impurities(source)


def test_the_check_itself_leaves_innocent_names_alone() -> None:
    assert impurities("import asyncio\nself.id = row.hash\nasyncio.get_running_loop().time()\nmember.time(3)") == []


def test_no_state_changes_inside_an_assertion_that_an_optimised_run_would_skip() -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CHANGES
    ]
    assert found == []
