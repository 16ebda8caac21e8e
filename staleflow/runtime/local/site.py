"""Where the processes of a run are: this machine. ``runtime/ray/site.py`` is the same for a cluster.

site = LocalSite(directory, config)
site.open()
left = site.left()                      # processes of an earlier control plane
server = await site.listen(on_hello)    # processes can connect
child = site.child(setup, term=1)       # to be started there, or adopted
await site.close()                      # nothing of the run is left there
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from staleflow.config import Config, estimate, this_machine
from staleflow.run.directory import RunDirectory
from staleflow.run.processes import Process, end, processes
from staleflow.runtime.local.link import Channel, listen
from staleflow.runtime.local.placement import Place, placement
from staleflow.runtime.local.process import Child
from staleflow.servers.weights import claim, discard, standby_of
from staleflow.types import Hello, Setup


class LocalSite:
    def __init__(self, directory: RunDirectory, config: Config) -> None:
        self.directory = directory
        self.config = config

    def open(self) -> None:
        """Before anything else. ``RunError`` if it cannot be used."""

    @property
    def door(self) -> Path:
        """What processes connect to."""
        return self.directory.socket

    def left(self) -> list[Process]:
        """Processes of an earlier control plane that live."""
        return list(processes(self.directory.path))

    def end(self, left: Iterable[Process]) -> None:
        """Kill them, and wait until they are gone."""
        end(left)

    def claims(self) -> AbstractContextManager[None]:
        """Meanwhile the run's shared memory here is not a leftover, nor what is there already."""
        return claim(*self._stores, keep=True)

    def discard(self) -> None:
        """Remove the run's shared memory here. None of its processes uses it."""
        discard(*self._stores)

    async def listen(self, on_hello: Callable[[Channel, Hello], None]) -> asyncio.Server:
        return await listen(self.door, on_hello)

    def child(self, setup: Setup, term: int) -> Child:
        return Child(setup, self.directory.log(setup.name), term)

    def places(self, instances: Sequence[str]) -> dict[str, Place]:
        """Cores and threads of every process, with these instances."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
        how = self.config.processes
        return placement(cores, instances, how.threads, how.pin, self.config.training.ranks)

    def refuses(self, config: Config, more: int) -> str | None:
        """Why there is no room for this many more instances; None if there is. May take a moment."""
        return estimate(config, this_machine()).problem_of_more(more)

    async def close(self) -> None:
        """Once all processes have ended."""
        self.door.unlink(missing_ok=True)

    @property
    def _stores(self) -> tuple[str, str]:
        return self.directory.store, standby_of(self.directory.store)
