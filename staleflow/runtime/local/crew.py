"""The processes of a run: started or adopted, listened to, replaced when they die, and stopped.

    crew = Crew(site, model, site.places(["i0", "i1"]), Watchdog(), on_death)
    await crew.listen()
    crew.start("instance", "i0", hear, ended)
    crew.send("i0", message)
    await crew.within(crew.all_ready(), "start of all processes", 300)
    await crew.stop()

Anything that the run cannot survive goes to ``fail``; a wait by ``within`` then ends at once. After that no
process is replaced, except those that ``only`` names.

Processes outlive the control plane. Those that an earlier one started are found and adopted by ``start``: they connect,
repeat what may not have been heard, and answer ``TakeOver``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from staleflow.errors import RunError
from staleflow.run.checkpoints import newest
from staleflow.run.processes import Process
from staleflow.runtime.local.link import Channel
from staleflow.runtime.local.placement import Place
from staleflow.runtime.local.process import Child
from staleflow.runtime.local.site import LocalSite
from staleflow.runtime.restarts import Restarts
from staleflow.runtime.watchdog import Standstill, Watchdog
from staleflow.types import Broken, Hello, Ready, Role, Setup, Stop

LOOK_S = 0.02
"""How often to look whether all processes are ready."""

Hear = Callable[[Child, Any], None]

START, RETURN = ("start", "its start"), ("return", "its return to another control plane")
"""What a process is asked for first: kind and words."""


class Crew:
    def __init__(
        self,
        site: LocalSite,
        model: Path,
        places: Mapping[str, Place],
        watchdog: Watchdog,
        on_death: Callable[[Child, str, float | None], None],
        checkpoint: Path | None = None,
        term: int = 1,
        standby: bool = False,
    ) -> None:
        """``on_death`` gets how a process ended, and in how many seconds it is started again; None: it is not.
        ``term``: of the control plane. ``standby``: the trainer's place is taken from the start, by one that
        continues from what an earlier one published."""
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
        self._site = site
        self._directory = site.directory
        self._model = model
        self._places = places
        self._checkpoint = checkpoint
        self._term = term
        self._standby = standby
        self._server: asyncio.Server | None = None
        self._found: dict[str, Process] = {}
        """Processes of an earlier control plane that nobody has adopted yet."""
        self._engines_work = standby
        """Whether one has made a token, if only in an earlier attempt."""
        self._without_token: set[str] = set()
        """Whose last engine, of the user's own, failed before it had made one."""
        self._stopping = False
        self._replacing: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Processes can connect from now on, and those that are there already can be adopted."""
        self._found = {each.name: each for each in self._site.left()}
        self._server = await self._site.listen(self._arrived)

    @property
    def orphans(self) -> list[str]:
        """Processes of an earlier control plane that have not been adopted."""
        return list(self._found)

    def returns_within(self, trainer_s: float) -> None:
        """Those that are there already come back at once, but for the trainer, which finishes its step before."""
        for name in self._found:
            self.watchdog.normal(name, RETURN[0], trainer_s if name == "trainer" else 0.0)

    def all_started(self) -> None:
        """A process that has not been adopted by now is not needed, and is stopped when it connects."""
        self._found.clear()

    def start(self, role: Role, name: str, hear: Hear, ended: Callable[[Child], None]) -> Child:
        """A process of this name: one that is there already, the first, or one in the place of another that has died.

        ``hear`` gets its messages; ``ended`` is called at once when it dies while the run continues.
        """
        found = self._found.pop(name, None)
        self.restarts.started(name, _now())
        self.watchdog.asked(name, *(RETURN if found else START), _now())
        incarnation = found.incarnation if found else self.incarnations.get(name, 0) + 1
        self.incarnations[name] = incarnation
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
            str(self._resumes_from(role, incarnation) or ""),
            standby=self._standby or incarnation > 1,
        )
        child = self.children[name] = self._site.child(setup, self._term)

        def on_end() -> None:
            if not self._is(child):
                return
            self.watchdog.forget(name)
            if self._matters(name):
                ended(child)
                task = asyncio.get_running_loop().create_task(self._replace(child, hear, ended), name=f"end of {name}")
                self._replacing.add(task)
                task.add_done_callback(self._replacing.discard)

        on_message = partial(self._hear, child, hear)
        if found:
            child.adopt(found.pid, on_message, on_end)
        else:
            child.start(self._site.door, on_message, on_end)
        return child

    def _resumes_from(self, role: Role, incarnation: int) -> Path | None:
        """For a trainer that cannot be revived: the newest checkpoint, once one has died."""
        later = newest(self._directory.checkpoints) if role == "trainer" and incarnation > 1 else None
        return later or self._checkpoint

    def keep(self, position: int, durable: int) -> None:
        """Tell all processes which of their messages are durable, so that they need not repeat them."""
        for child in self.children.values():
            child.keep(position, durable)

    def reaped(self, pid: int, code: int) -> None:
        """The supervisor says how an adopted process ended."""
        for child in self.children.values():
            if child.pid == pid:
                child.code = code

    def send(self, name: str, message: msgspec.Struct) -> None:
        self.children[name].send(message)

    def fail(self, why: str | Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(RunError(why) if isinstance(why, str) else why)

    def fatal(self, hear: Callable[..., None]) -> Callable[..., None]:
        """The same, whose errors end the run: whoever calls it would only log them, and a group would wait for ever."""

        def heard(*given: Any) -> None:
            try:
                hear(*given)
            except Exception as error:  # the user's own filter, or a bug
                self.fail(error)

        return heard

    def engine_works(self, name: str) -> None:
        """The engine of this process has made tokens."""
        self._engines_work = True
        self._without_token.discard(name)

    def look(self) -> list[Standstill]:
        """Processes that stand still. Those that have for too long are killed, and replaced as others that die."""
        now = _now()
        for child in self.children.values():
            if child.waits_for:
                self.watchdog.moved(child.name, now)  # there is nobody yet who could stand still
        found = self.watchdog.look(now)
        for each in found:
            if each.lost:
                child = self.children[each.name]
                child.hung = each.what
                self.watchdog.forget(each.name, now)
                child.kill()
        return found

    def place(self, places: Mapping[str, Place]) -> None:
        """Instances come or go: all processes move closer together or further apart."""
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
        """Until all processes are, except those that the run can do without."""
        while not all(child.ready.is_set() or name in self.optional for name, child in self.children.items()):
            await asyncio.sleep(LOOK_S)

    def give_up_adopted(self) -> None:
        """Replace those that have not answered. A trainer may be in the middle of a step, an evaluator is not needed:
        they have the watchdog's limits."""
        for child in self.children.values():
            if child.adopted and not child.ready.is_set() and child.setup.role == "instance":
                child.hung = "the new control plane asked what it holds"
                child.kill()

    async def within(self, work: Any, name: str, timeout_s: float | None = None) -> None:
        """Wait for something, but not longer than it may take, and not once the run has failed."""
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task, self.failure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self.failure in done:
                self.failure.result()
            waits = [f"{child.name} waits for {child.waits_for}" for child in self.children.values() if child.waits_for]
            raise RunError(
                "; ".join([f"the {name} took more than {timeout_s:g} s: see {self._directory.logs}", *waits])
            )
        task.result()

    async def stop(self) -> None:
        self._stopping = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*self._retiring, *(child.stop() for child in self.children.values()))
        if self._server is not None:
            self._server.close()

    def _arrived(self, channel: Channel, hello: Hello) -> None:
        child = self.children.get(hello.name)
        if child is not None and child.pid == hello.pid and not child.ended.is_set() and not self._stopping:
            child.arrived(channel, hello)
        elif child is not None and child.starts:
            channel.close()  # it is not known yet who it is: it tries again
        elif (found := self._found.get(hello.name)) is None or found.pid != hello.pid:
            channel.send(Stop())  # nobody needs it any more
        else:
            channel.close()  # its turn comes: it tries again

    def _hear(self, child: Child, hear: Hear, message: Any) -> None:
        if not self._is(child):
            return  # it has been retired
        if isinstance(message, Broken):
            self._broken(child, message)
            return
        if isinstance(message, Ready):
            self.watchdog.done(child.name, (RETURN if child.adopted else START)[0], _now())
        else:
            self.watchdog.moved(child.name, _now())
        try:
            hear(child, message)
        except Exception as error:  # a bug: the run ends with its own traceback
            self.fail(error)

    def _broken(self, child: Child, message: Broken) -> None:
        fatal = child.name not in self.optional
        if message.first:
            fatal = not self._engines_work or (fatal and child.name in self._without_token)
            self._without_token.add(child.name)
            if not fatal:
                return  # it is replaced as others that die
        child.broken = True
        if fatal:
            self.fail(f"{child.name}: {message.why}")

    def _is(self, child: Child) -> bool:
        """Whether it is the present process of its name."""
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
                self.start(role, name, hear, ended)
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
