"""A run's directory: what it was asked to do, what happened, and what came of it.

::

    runs/latest -> 20261115-191400-laptop
    runs/20261115-191400-laptop/
        config.yaml     everything that was asked for
        origin.json     what must be the same when it is resumed: settings, data, base model
        environment.json    how it was started, and the versions of packages
        events.db       the journal, and events.db-payload/ with the tokens; events-N.db if attempt N began another
        metrics.jsonl   one line per step
        decisions.jsonl what the coordinator decided and on what; the latest of it, and decisions.1.jsonl before that
        fleet.jsonl     what instances and trainer were doing, about once a second; and fleet.1.jsonl
        samples.jsonl   some prompts and responses of every step, with their rewards
        summary.json    the result
        report.html     what ``staleflow report`` made of it
        profile.json    what engine steps took
        logs/           one file per process
        checkpoints/    step-000060/, ... in Hugging Face format
        index.db        what ``staleflow dash`` has read of the journal; may be deleted; index.lock is its owner's
        watched         touched by ``staleflow dash`` while somebody looks
        requests/       what ``staleflow scale`` asks of the run, while it waits for the answer
        lock            held by the process that runs it

It belongs to its user alone (mode 0700): prompts, responses and what processes print are in it. ``chmod`` opens it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from staleflow.config import Config, ConfigError, load, to_yaml
from staleflow.errors import RunError
from staleflow.files import write_whole
from staleflow.servers.weights.segments import StoreRegistry
from staleflow.settings import TEXT

LONGEST_PATH = 400
"""Bytes of the folder of runs: SQLite opens paths of up to 512."""
_JOURNAL = re.compile(r"events(?:-(\d+))?\.db")


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.environment = path / "environment.json"
        self.report = path / "report.html"
        self.profile = path / "profile.json"
        self.metrics = path / "metrics.jsonl"
        self.decisions = path / "decisions.jsonl"
        self.samples = path / "samples.jsonl"
        self.fleet = path / "fleet.jsonl"
        self.watched = path / "watched"
        self.config_file = path / "config.yaml"
        self.requests = path / "requests"

    @classmethod
    def create(cls, config: Config, name: str) -> RunDirectory:
        """A new one under ``config.runs``, and the link ``latest`` to it."""
        runs = _usable(Path(config.runs).absolute())
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            path = next(path for path in _names(runs / stem) if _made(path))
            run = cls(path)
            run.make_folders()
            run.write_config(config)
            _link(runs / "latest", path.name)
        except OSError as error:
            raise ConfigError(f"{runs} cannot be written ({error.strerror}): give another folder by runs=...") from None
        return run

    @classmethod
    def at(cls, path: Path, config: Config) -> RunDirectory:
        """A new one with this path."""
        _in_utf8(path.absolute())
        try:
            path.mkdir(mode=0o700, parents=True)
            run = cls(path.resolve())
            run.write_config(config)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made ({error.strerror}): give a folder that does not exist") from None
        return run

    @classmethod
    def existing(cls, path: Path) -> tuple[RunDirectory, Config]:
        """The directory of a run that is to continue: a folder, or the name of one among ``runs``."""
        if not path.exists() and len(path.parts) == 1:
            path = Path(Config().runs) / path
        run = cls(_in_utf8(path.resolve()))
        if not run.config_file.is_file():
            why = "it has no config.yaml" if path.exists() else "there is nothing"
            raise ConfigError(
                f"{path} is not a run directory, {why}: staleflow runs lists what is here, staleflow train starts one"
            )
        return run, load(str(run.config_file), [])

    def journal(self, number: int = 1) -> Path:
        """One serves all attempts at the run. Only if it cannot be continued, another begins, with a later number."""
        return self.path / ("events.db" if number == 1 else f"events-{number}.db")

    @property
    def journals(self) -> list[int]:
        """The numbers of those that there are. The last one counts."""
        names = (_JOURNAL.fullmatch(each.name) for each in self.path.glob("events*.db"))
        return sorted(int(name[1] or 1) for name in names if name)

    def remove_journal(self, number: int) -> None:
        path = self.journal(number)
        shutil.rmtree(f"{path}-payload", ignore_errors=True)
        for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", ".lock"))):
            each.unlink(missing_ok=True)

    @property
    def store(self) -> str:
        """The name of its weights among those of all runs on the machine."""
        return f"{re.sub(r'[^A-Za-z0-9_-]', '_', self.path.name)}-{self._which}"

    @property
    def socket(self) -> Path:
        """Where its processes find the control plane: beside the weights, since a socket's path must be short."""
        return StoreRegistry(None).folder / f"{self._which}.sock"

    @property
    def _which(self) -> str:
        """Tells it from all other runs, also from one that had this path before."""
        return hashlib.blake2b(f"{self.path} {self.path.stat().st_ino}".encode(), digest_size=8).hexdigest()

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints / f"step-{version:06d}"

    @property
    def running(self) -> bool:
        """Whether a process runs it now."""
        try:
            handle = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    @contextmanager
    def owned(self) -> Iterator[RunDirectory]:
        """While this process runs it: nobody else may. Taken before anything is written; the kernel ends it."""
        try:
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written ({error.strerror}): make it writable, or copy it to another folder"
            ) from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
                raise RunError(f"{self.path} is being run by {owner}: stop it first, or wait for its end") from None
            with suppress(OSError):  # a full disk: then nobody can say who runs it
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield self
        finally:
            os.close(handle)

    def make_folders(self) -> None:
        """Those that every run has; somebody may have removed them from one that is resumed."""
        for each in (self.logs, self.checkpoints):
            each.mkdir(exist_ok=True)

    def write_config(self, config: Config) -> None:
        write_whole(self.config_file, to_yaml(config))

    def write(self, path: Path, values: dict[str, Any]) -> None:
        """As JSON."""
        write_whole(path, json.dumps(values, indent=1) + "\n")

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"


def _in_utf8(path: Path) -> Path:
    """What a run writes names its directory, in UTF-8; a folder may have any bytes in its name."""
    if problem := TEXT.problem(path):
        raise ConfigError(f"{path}{problem}")
    return path


def _usable(path: Path) -> Path:
    """For a new run: what it prints names its directory, to be copied, and SQLite opens a file in it."""
    _in_utf8(path)
    if not (name := str(path)).isprintable():
        raise ConfigError(f"{name!r} has characters that cannot be printed: give another folder by runs=...")
    if (size := len(name.encode())) > LONGEST_PATH:
        raise ConfigError(f"a path of {size} bytes is too long: give a folder of at most {LONGEST_PATH} by runs=...")
    return path


def _names(path: Path) -> Iterator[Path]:
    """The name, and others for a second run within the same second."""
    yield path
    for again in count(2):
        yield path.with_name(f"{path.name}-{again}")


def _made(path: Path) -> bool:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _link(link: Path, target: str) -> None:
    """Replaced in one move, so that it always points somewhere. Where links cannot be made, there is none."""
    draft = link.with_name(f".latest-{os.getpid()}")
    with suppress(OSError):
        draft.symlink_to(target)
        draft.replace(link)
