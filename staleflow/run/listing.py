"""The runs of a folder: which are alive, how far each is, and what came of it.

    for each in listed(Path("runs")): each.name, each.state, each.step, each.steps, each.result

Read from their files alone, newest first; a file that is torn or missing costs its own column and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from staleflow.errors import StaleFlowError
from staleflow.observe.metrics import read_metrics
from staleflow.run.checkpoints import newest
from staleflow.run.directory import RunDirectory

State = Literal["running", "finished", "stopped", "resumable", "failed", "unreadable"]
"""Of a run that is not alive: all its steps are made; it was asked to stop; it ended otherwise, and ``--resume``
continues it, or nothing is left to continue from; its config.yaml cannot be read."""


class Listed(msgspec.Struct):
    name: str
    path: str
    state: State
    step: int
    """Steps that are made."""
    steps: int | None
    """That were asked for."""
    accuracy: float | None
    """The latest that was measured on held-out problems: the mean reward if rewards are not 0 or 1."""
    reward: float | None
    """Mean over the latest step."""
    seconds: float | None
    """Of training."""
    bytes: int
    changed: float
    """When something was last written into it, in seconds since 1970. What whoever looks touches does
    not count."""


def listed(runs: Path) -> list[Listed]:
    """``latest`` is a link to one of them and not another."""
    folders = [each for each in runs.iterdir() if each.is_dir() and not each.is_symlink()] if runs.is_dir() else []
    found = [listed_run(each) for each in folders if (each / "config.yaml").is_file()]
    return sorted(found, key=lambda each: each.changed, reverse=True)


def listed_run(path: Path) -> Listed:
    """One of them."""
    run = RunDirectory(path.resolve())
    summary, rows = _summary(run), list[dict[str, Any]]()
    with suppress(OSError, StaleFlowError):
        rows = read_metrics(run.metrics)
    last = rows[-1] if rows else {}
    step = max(int(last.get("step", -1)) + 1, int(summary.get("steps") or 0))
    files = [(each.name, each.stat()) for each in _files(path)]
    try:
        steps: int | None = RunDirectory.existing(path)[1].steps
        state = _state(run, summary, step, steps)
    except StaleFlowError:
        steps, state = None, "unreadable"
    return Listed(
        path.name,
        str(run.path),
        state,
        step,
        steps,
        summary.get("accuracy_final"),
        last.get("reward"),
        last.get("time"),
        sum(about.st_size for _, about in files),
        max((about.st_mtime for name, about in files if not _touched(name, about.st_size)), default=0.0),
    )


def state_of(run: RunDirectory, made: int, steps: int) -> State:
    """Of a run that has ``made`` these of its ``steps``."""
    summary = _summary(run)
    return _state(run, summary, max(made, int(summary.get("steps") or 0)), steps)


def _state(run: RunDirectory, summary: dict[str, Any], step: int, steps: int) -> State:
    if run.running:
        return "running"
    if step >= steps or summary.get("stopped_early"):
        return "finished"
    if summary.get("interrupted") and summary.get("steps") == step:
        return "stopped"
    return "resumable" if newest(run.checkpoints) is not None or run.journals else "failed"


def _summary(run: RunDirectory) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(run.summary.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _touched(name: str, size: int) -> bool:
    """Whether it says only that somebody looked: locks, and what SQLite leaves beside a journal that it reads."""
    return name == "lock" or name.endswith((".lock", "-shm")) or (name.endswith("-wal") and not size)


def _files(path: Path) -> Iterator[Path]:
    """What is removed while we look does not count, nor what ``staleflow dash`` leaves, which only looks."""
    for each in path.rglob("*"):
        with suppress(OSError):
            if each.name.startswith("index.") or each.name == "watched":
                continue
            if each.is_file() and not each.is_symlink() and each.stat():
                yield each
