"""An asyncio event loop on virtual time: it never sleeps, and it is the same every time.

Production code runs on it unchanged: ``asyncio.sleep(3600)`` returns at once and ``loop.time()`` has moved by an
hour. Between two instants, when every callback of the present one has run, ``on_instant`` is called: the place for
invariants. When nothing is left that could ever happen and tasks are still pending, the run is stuck, and
``DeadlockError`` names those tasks instead of hanging. With ``shuffle``, callbacks ready at the same time run
in a random order that depends only on the seed. Use::

    loop = VirtualLoop()
    loop.run(main())
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlockError(RuntimeError):
    """No timer is left and tasks are pending."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, shuffle: int | None = None) -> None:
        self._now = 0.0
        self._random = random.Random(shuffle) if shuffle is not None else None
        self._idle = _Idle(self)
        self._failure: BaseException | None = None
        self.on_instant: Callable[[], None] | None = None
        self.instants = 0
        super().__init__(self._idle)

    @property
    def _clock_resolution(self) -> float:
        """The smallest step of the clock, so that a timer is due exactly when its time has come."""
        return math.ulp(self._now)

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """asyncio sets the resolution of the real clock; there is none here."""

    def time(self) -> float:
        return self._now

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """asyncio would log what a callback raises and go on; here it ends the run."""
        self._failure = self._failure or context.get("exception") or RuntimeError(context["message"])

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
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

    def advance(self, timeout: float | None) -> None:
        """Called where a real loop would wait: move to the next timer instead."""
        if self._failure is not None:
            raise self._failure
        if timeout is None:
            names = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise DeadlockError(f"at {self._now:.3f} s nothing can happen any more; pending: {', '.join(names)}")
        if timeout > 0:
            self.instants += 1
            if self.on_instant is not None:
                self.on_instant()
            if not self._ready:  # type: ignore[attr-defined]  # the check itself may have scheduled something
                self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        elif self._random is not None and len(self._ready) > 1:  # type: ignore[attr-defined]
            handles = list(self._ready)  # type: ignore[attr-defined]
            self._random.shuffle(handles)
            self._ready.clear()  # type: ignore[attr-defined]
            self._ready.extend(handles)  # type: ignore[attr-defined]


class _Idle(selectors.BaseSelector):
    """A selector that waits for no file: waiting is what moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.advance(timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:  # type: ignore[override]
        return self._keys

    def close(self) -> None:
        self._keys.clear()
