"""One process of a run on a node of a Ray cluster, as the control plane sees it: ``local/process.py`` over an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from staleflow.errors import line_of
from staleflow.runtime.local.process import REAP_S, Child
from staleflow.runtime.ray.host import WEIGHTS, About
from staleflow.runtime.ray.placing import FAILURES, Closed, Place, Places
from staleflow.types import Broken, Setup

FORCED_S = 5.0
"""A process that was killed counts as dead after this time, also if its node does not say so."""
LOST = "lost with its actor or node"


class HostedChild(Child):
    def __init__(self, setup: Setup, log: Path, term: int, places: Places, need: str, here: bool) -> None:
        """``need``: of its role, for people. ``here``: all nodes are this machine."""
        super().__init__(setup, log, term)
        self._places = places
        self._need = need
        self._here = here
        self._place: Place | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = self._stopped = False

    @property
    def cpu_s(self) -> float:
        return super().cpu_s if self._here else 0.0

    def start(self, path: Path, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._begin(self._started(path), on_message, on_end)

    def adopt(self, pid: int, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self.adopted = True
        self._place = self._places.of(self.name)
        self._on(self._place.about)
        self.pid = pid
        self._begin(self._lives(self._place), on_message, on_end)

    def move(self, cores: Sequence[int]) -> None:
        if self._here:
            super().move(cores)

    def kill(self) -> None:
        if self._alive() and self._place is not None:
            self._place.host.kill.remote()
            asyncio.get_running_loop().call_later(FORCED_S, self._forced)

    async def how_it_ended(self) -> str:
        how = await super().how_it_ended()
        return LOST if self._lost and not self.hung else how

    async def stop(self) -> None:
        self._stopped = True
        await super().stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._place is not None:
            with suppress(*FAILURES, TimeoutError):
                async with asyncio.timeout(REAP_S):
                    await self._place.host.close.remote()
            await asyncio.to_thread(self._places.give, self._place)

    # Within

    def _begin(
        self, life: Coroutine[Any, Any, None], on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        with suppress(OSError):
            self._log_begin = self.log.stat().st_size
        self._on_message, self._on_end = on_message, on_end
        self._task = asyncio.get_running_loop().create_task(life, name=f"life of {self.name}")

    async def _started(self, door: Path) -> None:
        self.waits_for = f"a node with room for {self._need}"
        self.waits_since = asyncio.get_running_loop().time()
        try:
            wait = partial(self._places.take, self.name, self.setup.role, lambda: self._stopped)
            place = await asyncio.get_running_loop().run_in_executor(self._places.threads, wait)
            self._place, self.waits_for = place, ""
            self._on(place.about)
            about = About(*await place.host.start.remote(str(door), msgspec.msgpack.encode(self.setup)))
        except Closed:
            return
        except Exception as error:  # of Ray: whatever it is, there is no process
            self.waits_for, self._lost = "", True
            if (why := refusal(error)) is not None:
                self._on_message(Broken(why))
            self._end()
            return
        self.pid = about.pid
        await self._lives(place)

    async def _lives(self, place: Place) -> None:
        try:
            self.code = await place.host.wait.remote()
        except FAILURES:
            self._lost = True
        self._dead()

    def _on(self, about: About) -> None:
        """Each node has a store of weights of its own."""
        store = f"{self.setup.store.partition('.')[0]}.{about.node[:12]}"
        source = str(Path(self.setup.run) / WEIGHTS)
        self.setup = msgspec.structs.replace(self.setup, store=store, source=source)

    def _forced(self) -> None:
        if not self.ended.is_set():
            self._lost = True
            if self._channel is not None:
                self._channel.close()
            self._end()

    def _alive(self) -> bool:
        return bool(self.pid) and self._task is not None and not self._task.done()

    async def _gone(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=REAP_S)


def refusal(error: Exception) -> str | None:
    """Why another try would not help: an actor has refused its node, or the cluster does not work any more. None if
    the actor or its node has died."""
    if not isinstance(error, FAILURES):
        return f"the Ray cluster does not work ({line_of(error)})"
    mark = "ValueError: "
    return next((line.partition(mark)[2] for line in str(error).splitlines() if mark in line), None)
