"""The processes of a run: started, listened to, replaced when they die, and stopped.

    crew = Crew(directory, model, placement([0, 1], instances=2))
    await crew.start("instance", "i0", hear, ended)
    crew.send("i0", message)
    await crew.within(crew.all_ready(), "start of all processes", 300)
    await crew.stop()

Anything that the run cannot survive goes to ``fail``; whoever waits through ``within`` hears of it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from staleflow.errors import RunError
from staleflow.run.directory import RunDirectory
from staleflow.runtime.local.placement import Place
from staleflow.runtime.local.process import Child
from staleflow.types import Broken, Role, Setup

MOST_STARTS = 5
"""A process that dies this often will die again."""

Hear = Callable[[Child, Any], None]


class Crew:
    def __init__(
        self, directory: RunDirectory, model: Path, places: Mapping[str, Place], checkpoint: Path | None = None
    ) -> None:
        self.children: dict[str, Child] = {}
        self.incarnations: dict[str, int] = {}
        """How often each was started."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure.add_done_callback(lambda failure: failure.exception())  # it may come when nobody waits any more
        self._directory = directory
        self._model = model
        self._places = places
        self._checkpoint = checkpoint
        self._stopping = False
        self._restarts: set[asyncio.Task[Child]] = set()

    async def start(self, role: Role, name: str, hear: Hear, ended: Callable[[Child], None]) -> Child:
        """Start a process of this name, the first or one in the place of another that has died.

        ``hear`` gets its messages; ``ended`` is told when it dies while the run goes on, before it is replaced.
        """
        incarnation = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        place = self._places[name]
        setup = Setup(
            role,
            name,
            incarnation,
            str(self._directory.path),
            str(self._model),
            self._directory.store,
            list(place.cores),
            place.threads,
            place.nice,
            str(self._checkpoint or ""),
            standby=incarnation > 1,
        )
        child = self.children[name] = Child(setup, self._directory.log(name))

        def on_end() -> None:
            if not self._stopping and not self.failure.done():
                ended(child)
                if not self.failure.done():
                    self._replace(child, hear, ended)

        await child.start(lambda message: self._hear(child, message, hear), on_end)
        return child

    def send(self, name: str, message: msgspec.Struct) -> None:
        self.children[name].send(message)

    def fail(self, why: str | Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(RunError(why) if isinstance(why, str) else why)

    def died(self, child: Child, what: str) -> None:
        """The run cannot do without it."""
        self.fail(
            f"{what}: {child.last_words()} (see {child.log}); "
            f"go on with: staleflow train --resume {self._directory.path}"
        )

    async def all_ready(self) -> None:
        await asyncio.gather(*(child.ready.wait() for child in self.children.values()))

    async def within(self, work: Any, name: str, timeout_s: float | None = None) -> None:
        """Wait for something, but not longer than it may take, and not once the run has failed."""
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task, self.failure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self.failure in done:
                self.failure.result()
            raise RunError(f"the {name} took more than {timeout_s:g} s: see {self._directory.logs}")
        task.result()

    async def stop(self) -> None:
        self._stopping = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self.children.values()))

    def _hear(self, child: Child, message: Any, hear: Hear) -> None:
        if isinstance(message, Broken):
            self.fail(f"{child.name}: {message.why}")
            return
        try:
            hear(child, message)
        except Exception as error:  # a mistake of ours: the run ends with its own traceback
            self.fail(error)

    def _replace(self, child: Child, hear: Hear, ended: Callable[[Child], None]) -> None:
        name = child.name
        if self.incarnations[name] >= MOST_STARTS:
            self.died(child, f"{name} died {MOST_STARTS} times, last")
            return
        start = self.start(child.setup.role, name, hear, ended)
        task = asyncio.get_running_loop().create_task(start, name=f"restart of {name}")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
