"""Reward workers under simulation: an answer after a random latency that depends only on the trajectory."""

import asyncio
import math
from collections.abc import Callable

from staleflow.servers.lifecycle import Trajectory
from staleflow.simulate.randomness import Keyed


class SimRewards:
    """Half of the mean latency is fixed, the rest exponential. A share of the answers never comes (``silent``)."""

    def __init__(
        self, keyed: Keyed, mean_s: float, success: float, scored: Callable[[str, float], None], silent: float = 0.0
    ) -> None:
        self._keyed = keyed
        self._mean_s = mean_s
        self._success = success
        self._scored = scored
        self.silent = silent
        self._asked: dict[str, int] = {}

    def score(self, trajectory: Trajectory) -> None:
        name = trajectory.name
        reward = float(self._keyed.uniform("reward", name) < self._success)
        tries = 0
        if self.silent:
            tries = self._asked[name] = self._asked.get(name, 0) + 1
            if self._keyed.uniform("silent", name, tries) < self.silent:
                return
        if self._mean_s:
            wait = self._mean_s * (0.5 - 0.5 * math.log(self._keyed.uniform("latency", name, tries)))
            asyncio.get_running_loop().call_later(wait, self._scored, name, reward)
        else:
            self._scored(name, reward)
