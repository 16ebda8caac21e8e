"""A run's directory: what it was asked to do, what happened, and what came of it.

::

    runs/latest -> 20261115-191400-laptop
    runs/20261115-191400-laptop/
        config.yaml     everything that was asked for
        events.db       the journal of the present life of the run
        metrics.jsonl   one line per step
        summary.json    the result
        profile.json    what engine steps took
        logs/           one file per process
        checkpoints/    step-000060/, ... in Hugging Face format
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from staleflow.config import Config, ConfigError, load, to_yaml
from staleflow.files import write_whole


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.summary = path / "summary.json"
        self.profile = path / "profile.json"
        self.metrics = path / "metrics.jsonl"
        self.config_file = path / "config.yaml"

    @classmethod
    def create(cls, config: Config, name: str) -> RunDirectory:
        """A new one under ``config.runs``, and the link ``latest`` to it."""
        runs = Path(config.runs).absolute()
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            path = next(path for path in _names(runs / stem) if _made(path))
            run = cls(path)
            run.logs.mkdir()
            run.checkpoints.mkdir()
            run.config_file.write_text(to_yaml(config))
            _link(runs / "latest", path.name)
        except OSError as error:
            raise ConfigError(f"{runs} cannot be written ({error.strerror}): give another folder by runs=...") from None
        return run

    @classmethod
    def existing(cls, path: Path) -> tuple[RunDirectory, Config]:
        """That of a run that is to go on."""
        run = cls(path.resolve())
        if not run.config_file.is_file():
            raise ConfigError(f"{path} is no run: give a folder that has a config.yaml, such as runs/latest")
        return run, load(str(run.config_file), [])

    def journal(self, life: int) -> Path:
        """Each life of a run has a journal of its own: it begins with the state that it resumes from."""
        return self.path / ("events.db" if life == 1 else f"events-{life}.db")

    @property
    def lives(self) -> int:
        return len(list(self.path.glob("events*.db")))

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints / f"step-{version:06d}"

    def write(self, path: Path, values: dict[str, Any]) -> None:
        """All of it or nothing, as JSON."""
        write_whole(path, json.dumps(values, indent=1) + "\n")

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"


def _names(path: Path) -> Iterator[Path]:
    """The name, and others for a second run within the same second."""
    yield path
    for again in count(2):
        yield path.with_name(f"{path.name}-{again}")


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _link(link: Path, target: str) -> None:
    """Replaced in one move, so that it always points somewhere. Where links cannot be made, there is none."""
    draft = link.with_name(f".latest-{os.getpid()}")
    with suppress(OSError):
        draft.symlink_to(target)
        draft.replace(link)
