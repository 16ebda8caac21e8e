"""An asyncio event loop on virtual time: it never sleeps, and it is the same every time.

Production code runs on it unchanged: ``asyncio.sleep(3600)`` returns at once and ``loop.time()`` has moved by an
hour. Between two instants, when every callback of the present one has run, ``on_instant`` is called: the place for
invariants. When nothing is left that could ever happen and tasks are still pending, the run is stuck, and
``DeadlockError`` names those tasks instead of hanging. What a callback raises ends the run. With ``shuffle``, callbacks
that are ready at the same time run in a random order that depends only on the seed. Use::

    loop = VirtualLoop()
    loop.run(main())
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVar

from staleflow.errors import RunError

T = TypeVar("T")


class DeadlockError(RunError):
    """No timer is left and tasks are pending."""

    exit_code = 1


class VirtualLoop(asyncio.SelectorEventLoop):
    _ready: deque[asyncio.Handle]

    def __init__(self, shuffle: int | None = None) -> None:
        self.now = 0.0
        self.on_instant: Callable[[], None] | None = None
        self.instants = 0
        self._timers: list[tuple[float, int, Callable[..., object], tuple[Any, ...], asyncio.TimerHandle | None]] = []
        self._count = 0
        self._random = random.Random(shuffle) if shuffle is not None else None
        self._failure: BaseException | None = None
        super().__init__(_Idle(self))

    def time(self) -> float:
        return self.now

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """A timer that is never cancelled: much cheaper than ``call_at``."""
        self._count += 1
        heappush(self._timers, (when, self._count, callback, args, None))

    def jump(self, seconds: float) -> None:
        """The process stood still, or its machine slept: timers that were due meanwhile are late."""
        self.now += seconds

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heappush(self._timers, (when, self._count, callback, args, handle))
        return handle

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end, then cancel what it left behind."""
        try:
            asyncio.set_event_loop(self)
            return self.run_until_complete(main)
        finally:
            self._failure, self.on_instant = None, None
            left = asyncio.all_tasks(self)
            for task in left:
                task.cancel()
            if left:
                self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            asyncio.set_event_loop(None)
            self.close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """asyncio would log what a callback raises and continue; here it ends the run."""
        self._failure = self._failure or context.get("exception") or RuntimeError(context["message"])

    def turn(self) -> None:
        """Called where a real loop would wait: run timers until one of them has made something else ready."""
        if self._failure is not None:
            raise self._failure
        if self._random is not None and len(self._ready) > 1:
            handles = list(self._ready)
            self._random.shuffle(handles)
            self._ready.clear()
            self._ready.extend(handles)
        timers = self._timers
        while not self._ready:
            if not timers:
                names = sorted(task.get_name() for task in asyncio.all_tasks(self))
                raise DeadlockError(f"at {self.now:.3f} s nothing can happen any more; pending: {', '.join(names)}")
            if timers[0][0] > self.now:
                self.instants += 1
                if self.on_instant is not None:
                    self.on_instant()
                self.now = timers[0][0]
            _, _, callback, args, handle = heappop(timers)
            if handle is None or not handle.cancelled():
                callback(*args)


class _Idle(selectors.BaseSelector):
    """A selector without files: where a real one would wait, the virtual clock moves on."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # noqa: ARG002
        self._loop.turn()
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:  # type: ignore[override]
        return self._keys

    def close(self) -> None:
        self._keys.clear()
