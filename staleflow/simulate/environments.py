"""Environments under simulation: episodes of several turns, with tools that take their time.

The tokens of an episode are shared evenly by its turns. Between two of them the tool works for a random time that
depends only on the episode and the turn, half of the mean at least, and gives some tokens. The reward follows the last.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from staleflow.agents.outcome import scored
from staleflow.agents.turns import EpisodeOverError
from staleflow.runtime.episodes import Episodes
from staleflow.tasks.task import Problem
from staleflow.types import token_count

if TYPE_CHECKING:
    from staleflow.simulate.cluster import Cluster


class SimEnvironments:
    """``EnvironmentPort`` of environments that play in the loop of the simulation."""

    def __init__(self, cluster: Cluster) -> None:
        self.episodes: Episodes | None = None
        """Whom they ask for turns."""
        self._cluster = cluster
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def play(self, episode: str, attempt: int, problem: Problem) -> None:  # noqa: ARG002
        self.cancel(episode)
        self._tasks[episode] = asyncio.get_running_loop().create_task(self._play(episode, attempt), name=episode)

    def cancel(self, episode: str) -> None:
        if (task := self._tasks.pop(episode, None)) is not None:
            task.cancel()
            self.left(episode)

    def close(self) -> None:
        for episode in list(self._tasks):
            self.cancel(episode)

    def left(self, episode: str) -> None:
        """An episode has ended, or was given up."""

    async def before_turn(self, episode: str, turn: int) -> None:
        """Nothing holds a turn up."""

    async def _play(self, episode: str, attempt: int) -> None:
        setting, episodes = self._cluster.setting, self.episodes
        assert episodes is not None
        at, tokens = self._cluster.size_of(episode)
        turns = min(setting.turns, tokens)
        try:
            for turn in range(turns):
                given = range(setting.tool_tokens if turn else 0)
                share = tokens * (turn + 1) // turns - tokens * turn // turns
                await self.before_turn(episode, turn)
                made = await episodes.turn(episode, at, given, share)
                at += len(given) + token_count(made.spans)
                await asyncio.sleep(self._seconds(episode, turn, last=turn == turns - 1))
        except EpisodeOverError:
            return
        self._tasks.pop(episode, None)
        self.left(episode)
        episodes.outcome(episode, attempt, scored(self._cluster.rewards.reward(episode)))

    def _seconds(self, episode: str, turn: int, last: bool) -> float:
        mean = self._cluster.setting.reward_s if last else self._cluster.setting.tool_s
        return mean * (0.5 - 0.5 * math.log(self._cluster.keyed.uniform("tool", episode, turn))) if mean else 0.0
