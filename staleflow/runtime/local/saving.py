"""The checkpoints of a run: when the next is due, what the trainer was asked for, and which of them stay.

    saving = Saving(directory, Checkpoints(every=0, minutes=10), also, send, warn)
    if saving.due(version, now): saving.ask(version, now)
    saving.heard(message)                       # Saved
    why = await saving.ask(version, now).wait() # empty: it is there

A periodic checkpoint that cannot be written is a warning; one for which there is no room is not even begun.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from staleflow.config.schema import Checkpoints
from staleflow.run.checkpoints import checkpoints, newest
from staleflow.run.directory import RunDirectory
from staleflow.training.checksums import REMOVED
from staleflow.types import Saved

SPARE = 1.1
"""A checkpoint may be larger than the one before: more trajectories go along."""

SOONEST_S = 60.0
"""Between two that are made because the journal has grown."""


@dataclass(slots=True, eq=False)
class Asked:
    version: int
    also: dict[str, bytes]
    why: str = ""
    """It could not be made."""
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, why: str) -> None:
        self.why = why
        self._done.set()

    async def wait(self) -> str:
        await self._done.wait()
        return self.why


class Saving:
    def __init__(
        self,
        directory: RunDirectory,
        options: Checkpoints,
        also: Callable[[], dict[str, bytes]],
        send: Callable[[Path, dict[str, bytes]], None],
        warn: Callable[[str, str], None],
    ) -> None:
        """``also``: the control plane's part of one made now. ``warn``: in a few words, and in full."""
        self._directory = directory
        self._options = options
        self._also = also
        self._send = send
        self._warn = warn
        self._asked: dict[Path, Asked] = {}
        self._last: float | None = None
        """When one was last asked for, or training began."""

    def begin(self, now: float) -> None:
        self._last = now

    def due(self, version: int, now: float, much: bool = False) -> bool:
        """``much``: the journal keeps more than it should for what came after the last one."""
        every, seconds = self._options.every, 60 * self._options.minutes
        since = now - self._last if self._last is not None else 0.0
        by_time = 0 < seconds <= since
        by_size = much and since >= SOONEST_S and not self._asked and bool(seconds or every)
        return by_time or by_size or bool(every and version % every == 0)

    def periodic(self, version: int, now: float) -> None:
        """One that the run can do without."""
        self._last = now
        before = newest(self._directory.checkpoints)
        needed = SPARE * _size(before) if before is not None else 0
        free = shutil.disk_usage(self._directory.path).free
        if free < needed:
            where = f"{free / 2**30:.2f} GiB are free in {self._directory.path}, one takes {needed / 2**30:.2f}"
            self._warn("no room", f"the checkpoint of step {version} is left out: {where}; make room")
        else:
            self.ask(version)

    def ask(self, version: int) -> Asked:
        """The trainer gets this before any word of the next step's end, so it is at this version then."""
        folder = self._directory.checkpoint(version)
        asked = self._asked[folder] = Asked(version, self._also())
        self._send(folder, asked.also)
        return asked

    def heard(self, message: Saved) -> None:
        asked = self._asked.pop(Path(message.folder), None)
        if message.why:
            self._warn("not written", f"the checkpoint of step {message.version} could not be written: {message.why}")
        else:
            self._prune()
        if asked is not None:
            asked.end(message.why)

    def trainer_back(self, version: int) -> None:
        """Another trainer, at this version: what the dead one was asked for is asked again, if it can still be made."""
        for folder, asked in list(self._asked.items()):
            if asked.version == version:
                self._send(folder, asked.also)
            else:
                self.heard(Saved(str(folder), asked.version, "the trainer died before"))

    def _prune(self) -> None:
        """Keep the latest checkpoints only. One is renamed first, so that a half deleted one has no name to go by."""
        if keep := self._options.keep:
            for folder in checkpoints(self._directory.checkpoints)[:-keep]:
                gone = folder.rename(folder.with_name(f"{REMOVED}{folder.name}"))
                shutil.rmtree(gone, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
