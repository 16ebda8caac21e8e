"""What the evaluator was asked and has not answered: asked again of its successor, and in the end reported as missing.

    evaluations = Evaluations(send, missing)
    evaluations.ask(version)
    evaluations.answered(version)               # and those asked before it
    evaluations.died(); evaluations.back()      # the evaluator, and the one that takes its place
    await evaluations.settled(version)          # answered, missing, or given up waiting for

No evaluation ends a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TRIES = 3
"""Evaluators that may die of one evaluation."""


class Evaluations:
    def __init__(self, send: Callable[[bool], None], missing: Callable[[int, str], None]) -> None:
        """``send``: to the evaluator, for now or for later. ``missing``: what will not be measured, and why."""
        self._send = send
        self._missing = missing
        self._asked: dict[int, bool] = {}
        """By version: whether it is to be evaluated now, or kept for later."""
        self._deaths = 0
        """Since the last answer."""
        self._gone = ""
        """Why there is no evaluator any more."""
        self._news = asyncio.Event()
        self._waiting = True

    @property
    def open(self) -> bool:
        return bool(self._asked)

    def ask(self, version: int, now: bool = True) -> None:
        self._asked[version] = now
        if self._gone:
            self._drop([version], self._gone)
        else:
            self._send(now)

    def answered(self, version: int) -> None:
        self._deaths = 0
        self._asked = {each: now for each, now in self._asked.items() if each > version}
        self._news.set()

    def died(self) -> None:
        """The evaluator has. What it kept for later is for the next."""
        self._deaths += any(self._asked.values())
        if self._deaths >= TRIES:
            self._drop(list(self._asked), f"{TRIES} evaluators died of it")
            self._deaths = 0

    def back(self) -> None:
        if self._asked:
            self._send(any(self._asked.values()))

    def end(self, why: str) -> None:
        """There will be no evaluator any more."""
        self._gone = why
        self._drop(list(self._asked), why)

    def wait_no_more(self) -> None:
        self._waiting = False
        self._news.set()

    async def settled(self, version: int) -> None:
        """Until this version is evaluated or known to be missing, unless nobody waits any more."""
        while version in self._asked and self._waiting:
            self._news.clear()
            await self._news.wait()

    def _drop(self, versions: list[int], why: str) -> None:
        for version in versions:
            del self._asked[version]
            self._missing(version, why)
        self._news.set()
