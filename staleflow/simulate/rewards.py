"""Reward workers under simulation: an answer after a random latency that depends only on the trajectory."""

import math
from collections.abc import Callable

from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.randomness import Keyed


class SimRewards:
    """Half of the mean latency is fixed, the rest exponential. A share of the answers never comes (``silent``), another
    says that the response could not be scored (``failing``)."""

    def __init__(
        self,
        loop: VirtualLoop,
        keyed: Keyed,
        mean_s: float,
        success: float | None,
        scored: Callable[[str, float], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """``success``: the share of rewards that are 1 instead of 0; None: all are 1, and nothing is drawn."""
        self._loop = loop
        self._keyed = keyed
        self._mean_s = mean_s
        self._success = success
        self._scored = scored
        self._failed = failed
        self.silent = 0.0
        self.failing = 0.0
        self._asked: dict[str, int] = {}

    def reward(self, name: str) -> float:
        return 1.0 if self._success is None else float(self._keyed.uniform("reward", name) < self._success)

    def score(self, name: str) -> None:
        reward = self.reward(name)
        tries = 0
        if self.silent or self.failing:
            tries = self._asked[name] = self._asked.get(name, 0) + 1
            fate = self._keyed.uniform("silent", name, tries)
            if fate < self.silent:
                return
            if fate > 1 - self.failing:
                self._loop.at(self._loop.now, self._failed, name, "the reward worker died")
                return
        if self._mean_s:
            wait = self._mean_s * (0.5 - 0.5 * math.log(self._keyed.uniform("latency", name, tries)))
            self._loop.at(self._loop.now + wait, self._scored, name, reward)
        else:
            self._scored(name, reward)
