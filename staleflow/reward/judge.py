"""Many responses scored at once, for those that have no event loop: an evaluation.

    judge = Judge(Reward("my_module:reward"), decoder="tokenizer.json")
    judge([(problem, tokens), ...], moved)          # [Judgement(1.0), "the reward took more than 10 s", ...]

They go through a pool as those of the training do, so a reward that hangs, dies or is away costs what it costs there.
Each is asked once; where none of many in a row can be scored, the rest is not waited for.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from staleflow.reward.options import Reward
from staleflow.reward.pool import RewardPool
from staleflow.tasks.task import Problem

IN_A_ROW = 16
"""Failures after which the next ones would fail as well."""


class Judgement(NamedTuple):
    reward: float
    parts: tuple[float, ...] = ()
    """Where there are several rewards: each of them."""


class Judge:
    def __init__(
        self,
        options: Reward,
        decoder: str,
        cut: Callable[[bytes], bool] = lambda _: False,
        on_away: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``RewardError`` if the function cannot be loaded. ``cut``: whether a length limit ended a response;
        ``on_away`` is told whenever a service that is away was asked in vain."""
        self._cut = cut
        self._runner = asyncio.Runner()
        self._pool = RewardPool(options, self._scored, self._failed, decoder=decoder, on_away=on_away)
        self._judged: dict[str, Judgement | str] = {}
        self._in_a_row = 0
        self._news = asyncio.Event()
        self._runner.run(self._pool.start())

    def __call__(
        self, answers: Sequence[tuple[Problem, Sequence[int]]], moved: Callable[[], None]
    ) -> list[Judgement | str]:
        return self._runner.run(self._judge(answers, moved))

    async def _judge(
        self, answers: Sequence[tuple[Problem, Sequence[int]]], moved: Callable[[], None]
    ) -> list[Judgement | str]:
        self._judged, self._in_a_row = {}, 0
        for at, (problem, tokens) in enumerate(answers):
            ids = struct.pack(f"<{len(tokens)}i", *tokens)
            self._pool.submit(str(at), problem, ids, cut=self._cut(ids))
        while len(self._judged) < len(answers) and self._in_a_row < IN_A_ROW:
            self._news.clear()
            try:
                async with asyncio.timeout(1.0):  # the pool is alive, whatever a response takes
                    await self._news.wait()
            except TimeoutError:
                pass
            moved()
        why = next((each for each in reversed(self._judged.values()) if isinstance(each, str)), "")
        if len(self._judged) < len(answers):
            await self._pool.close()
        return [
            self._judged.get(str(at), f"not asked after {IN_A_ROW} failures, last: {why}") for at in range(len(answers))
        ]

    def _scored(self, name: str, reward: float, parts: tuple[float, ...]) -> None:
        self._judged[name], self._in_a_row = Judgement(reward, parts), 0
        self._news.set()

    def _failed(self, name: str, why: str) -> None:
        self._judged[name] = why
        self._in_a_row += 1
        self._news.set()
