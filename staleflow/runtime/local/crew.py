"""The processes of a run: started, listened to, replaced when they die, and stopped.

    crew = Crew(directory, model, placement([0, 1], ["i0", "i1"]), Watchdog(), on_death)
    await crew.start("instance", "i0", hear, ended)
    crew.send("i0", message)
    await crew.within(crew.all_ready(), "start of all processes", 300)
    await crew.stop()

Anything that the run cannot survive goes to ``fail``; whoever waits through ``within`` hears of it at once. After that
nobody is replaced, until ``only`` says for whom it is still tried.
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
from staleflow.runtime.restarts import Restarts
from staleflow.runtime.watchdog import Standstill, Watchdog
from staleflow.types import Broken, Ready, Role, Setup

Hear = Callable[[Child, Any], None]


class Crew:
    def __init__(
        self,
        directory: RunDirectory,
        model: Path,
        places: Mapping[str, Place],
        watchdog: Watchdog,
        on_death: Callable[[Child, str, float | None], None],
        checkpoint: Path | None = None,
    ) -> None:
        """``on_death`` is told how a process ended, and in how many seconds it is started again; None: it is not."""
        self.children: dict[str, Child] = {}
        self.incarnations: dict[str, int] = {}
        """How often each was started."""
        self.watchdog = watchdog
        self.restarts = Restarts()
        self.optional: set[str] = set()
        """Those that the run can do without."""
        self.leaving: set[str] = set()
        """Those that are not replaced when they die: they are to be retired."""
        self._wanted: set[str] | None = None
        """Those that are replaced when they die; None: all."""
        self.failure = self._no_failure()
        self._on_death = on_death
        self._directory = directory
        self._model = model
        self._places = places
        self._checkpoint = checkpoint
        self._stopping = False
        self._replacing: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self, role: Role, name: str, hear: Hear, ended: Callable[[Child], None]) -> Child:
        """Start a process of this name, the first or one in the place of another that has died.

        ``hear`` gets its messages; ``ended`` is told at once when it dies while the run continues.
        """
        self.restarts.started(name, _now())
        self.watchdog.asked(name, "start", "its start", _now())
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
            if not self._is(child):
                return
            self.watchdog.forget(name)
            if self._matters(name):
                ended(child)
                task = asyncio.get_running_loop().create_task(self._replace(child, hear, ended), name=f"end of {name}")
                self._replacing.add(task)
                task.add_done_callback(self._replacing.discard)

        await child.start(lambda message: self._hear(child, message, hear), on_end)
        return child

    def send(self, name: str, message: msgspec.Struct) -> None:
        self.children[name].send(message)

    def fail(self, why: str | Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(RunError(why) if isinstance(why, str) else why)

    def look(self) -> list[Standstill]:
        """Who stands still. Those that have for too long are killed, and replaced as any other that dies."""
        now = _now()
        found = self.watchdog.look(now)
        for each in found:
            if each.lost:
                child = self.children[each.name]
                child.hung = each.what
                self.watchdog.forget(each.name, now)
                child.kill()
        return found

    def place(self, places: Mapping[str, Place]) -> None:
        """Others come or go: everybody moves together, or has more room."""
        self._places = places
        for name, child in self.children.items():
            if name in places:
                child.move(places[name].cores)

    def retire(self, name: str) -> None:
        """End a process for good; one that is to be started again is not."""
        self.leaving.discard(name)
        self.watchdog.forget(name)
        if (child := self.children.pop(name, None)) is not None:
            task = asyncio.get_running_loop().create_task(child.stop(), name=f"end of {name}")
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def only(self, *names: str) -> None:
        """The run has failed. To save it, these are needed, and replaced once more if they die."""
        self._wanted, self.failure = set(names), self._no_failure()

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
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*self._retiring, *(child.stop() for child in self.children.values()))

    def _hear(self, child: Child, message: Any, hear: Hear) -> None:
        if not self._is(child):
            return  # it has been retired
        if isinstance(message, Broken):
            child.broken = True
            if child.name not in self.optional:
                self.fail(f"{child.name}: {message.why}")
            return
        if isinstance(message, Ready):
            self.watchdog.done(child.name, "start", _now())
        else:
            self.watchdog.moved(child.name, _now())
        try:
            hear(child, message)
        except Exception as error:  # a mistake of ours: the run ends with its own traceback
            self.fail(error)

    def _is(self, child: Child) -> bool:
        """Whether it is the one that goes by its name now."""
        return self.children.get(child.name) is child

    def _matters(self, name: str) -> bool:
        return not self._stopping and not self.failure.done() and (self._wanted is None or name in self._wanted)

    async def _replace(self, child: Child, hear: Hear, ended: Callable[[Child], None]) -> None:
        name, role = child.name, child.setup.role
        how = await child.how_it_ended()
        ends = not self._is(child) or name in self.leaving or (child.broken and name in self.optional)
        pause_s = None if ends else self.restarts.died(name, _now())
        self._on_death(child, how, pause_s)
        if not self._matters(name) or child.broken or ends:
            return
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            if not self._matters(name) or not self._is(child):
                return
            try:
                await self.start(role, name, hear, ended)
            except OSError as error:
                self.fail(f"{name} cannot be started again ({error})")
        elif name not in self.optional:
            often = f"{self.restarts.count(name)} times in {self.restarts.within_s / 60:g} minutes"
            words = ": ".join(filter(None, (how, child.last_words())))
            self.fail(f"{name} died {often}, last {words} (see {child.log})")

    def _no_failure(self) -> asyncio.Future[None]:
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failure.add_done_callback(lambda failure: failure.exception())  # it may come when nobody waits any more
        return failure


def _now() -> float:
    return asyncio.get_running_loop().time()
