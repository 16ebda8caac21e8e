"""Reward dispatch: every generated trajectory is scored, or its group is given up with the reason.

A worker that fails or does not answer in time is asked again, ``tries`` times in all. A missing reward is never a zero.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from staleflow.runtime.ports import RewardPort
from staleflow.servers.lifecycle import Trajectory


@dataclass(slots=True)
class _Asked:
    trajectory: Trajectory
    tries: int
    since: float
    expires: float


class Scoring:
    def __init__(
        self, port: RewardPort, timeout_s: float, tries: int, give_up: Callable[[Trajectory, str], None]
    ) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self._tries = tries
        self._give_up = give_up
        self.on_answer: Callable[[float], None] = lambda _seconds: None
        """Called with the seconds that each answer took."""
        self._asked: dict[str, _Asked] = {}
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, trajectory: Trajectory, tries: int = 1) -> None:
        now = asyncio.get_running_loop().time()
        if tries > 1:
            self._asked.pop(trajectory.name, None)  # so that the dictionary stays in the order of expiry
        self._asked[trajectory.name] = _Asked(trajectory, tries, now, now + self._timeout_s)
        if self._timer is None:
            self._arm()
        self._port.score(trajectory)

    def answered(self, name: str) -> bool:
        """Whether anyone was waiting for this answer."""
        asked = self._asked.pop(name, None)
        if asked is None:
            return False
        self.on_answer(asyncio.get_running_loop().time() - asked.since)
        return True

    def failed(self, name: str, why: str) -> None:
        asked = self._asked.get(name)
        if asked is None:
            return
        if asked.trajectory.state != "generated":  # its group is complete without it, or was given up
            del self._asked[name]
        elif asked.tries < self._tries:
            self.ask(asked.trajectory, asked.tries + 1)
        else:
            del self._asked[name]
            self._give_up(asked.trajectory, why)

    def close(self) -> None:
        """Stop waiting: answers that still come are ignored."""
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._asked:
            first = next(iter(self._asked.values()))
            self._timer = asyncio.get_running_loop().call_at(first.expires, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._asked and (first := next(iter(self._asked.values()))).expires <= now:
            self.failed(first.trajectory.name, "reward timed out")
        self._arm()
