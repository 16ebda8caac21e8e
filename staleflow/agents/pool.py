"""Supervised workers that play episodes: the environments' side of the control plane.

Every episode that is begun and not cancelled has one outcome, by ``on_outcome(episode, attempt, outcome)`` in the event
loop that started the pool. A phase that takes too long is interrupted; if that does not help, its worker is killed with
everything that it has started, as is one in which a cancelled episode continues. A worker that dies is replaced, and
affects the episodes that it played, no others: one that is to blame has failed, and so has one that loses its second
worker; the others are ``on_lost(episode, attempt)``. Attempts are counted by the control plane::

    pool = EnvironmentPool(options, endpoint, on_outcome, on_lost, stderr)
    await pool.start()                          # ConfigError if the environment cannot be loaded
    pool.play("p0/0", attempt=1, problem)
    pool.cancel("p0/0")                         # nothing more is heard of it
    await pool.close()
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from staleflow.agents.options import Environment
from staleflow.agents.outcome import Outcome, failed
from staleflow.agents.play import Phase
from staleflow.agents.player import Player
from staleflow.agents.worker_messages import Begin, Cancel, Ended, Entered, Over, pack
from staleflow.errors import ConfigError
from staleflow.tasks.task import Problem

GRACE_S = 5.0
"""How long an episode that was told to stop, or cancelled, may take before its worker is killed."""
LONGEST_TICK_S = 1.0
"""Between two looks at the clocks of the episodes."""


class Gate(Protocol):
    """The endpoint, as the pool sees it."""

    @property
    def url(self) -> str: ...

    def open(self, episode: str) -> str:
        """A new secret for the episode, with which its calls are answered until it is sealed."""
        ...

    def seal(self, episode: str) -> None: ...

    def calls(self, episode: str) -> int:
        """Calls of the model that are not answered yet."""
        ...


@dataclass(slots=True)
class Episode:
    name: str
    attempt: int
    number: int
    problem: Problem
    player: Player | None = None
    """None: it waits for a place."""
    phase: Phase = "agent"
    spent: dict[Phase, float] = field(default_factory=dict[Phase, float])
    stopped_s: float | None = None
    """How long ago it was told to stop, if it was."""
    cancelled: bool = False


class EnvironmentPool:
    def __init__(
        self,
        options: Environment,
        gate: Gate,
        on_outcome: Callable[[str, int, Outcome], None],
        on_lost: Callable[[str, int], None],
        stderr: int | None = None,
        on_worker_lost: Callable[[str], None] = lambda _: None,
        grace_s: float = GRACE_S,
    ) -> None:
        """``on_worker_lost`` is called with the reason whenever a worker died or was killed."""
        self.options = options
        self._gate = gate
        self._on_outcome = on_outcome
        self._on_lost = on_lost
        self._on_worker_lost = on_worker_lost
        self._stderr = stderr
        self._grace_s = grace_s
        self._limits: dict[Phase, float] = {
            "setup": options.setup_s,
            "agent": options.agent_s,
            "score": options.score_s,
        }
        self._tick_s = min(LONGEST_TICK_S, grace_s, min(self._limits.values()) / 4)
        self._numbers = count(1)
        self._named: dict[str, Episode] = {}
        """Episodes that have no outcome yet and were not cancelled."""
        self._playing: dict[int, Episode] = {}
        """Those that a worker has, by number; cancelled ones too, until it has said that they are over."""
        self._queue: deque[Episode] = deque()
        self._again: set[str] = set()
        """Episodes that failed or were lost, until they are played again."""
        self._lost_once: set[str] = set()
        self._players: set[Player] = set()
        self._starting = 0
        self._adding: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pending(self) -> int:
        """Episodes that wait or are being played."""
        return len(self._named)

    def phase(self, episode: str) -> Phase | None:
        """What it is in; None: it waits for a place, or is not here."""
        found = self._named.get(episode)
        return None if found is None or found.player is None else found.phase

    async def start(self) -> None:
        """Start one worker, to learn at once if the environment cannot be loaded; then the others."""
        self._players.add(await Player.start(self.options, self._stderr, self))
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        self._grow()
        self._dispatch()

    def play(self, episode: str, attempt: int, problem: Problem) -> None:
        """Begin an episode. The same attempt again is ignored; another one takes the place of the one before."""
        if (before := self._named.get(episode)) is not None:
            if before.attempt == attempt:
                return
            self.cancel(episode)
        new = self._named[episode] = Episode(episode, attempt, next(self._numbers), problem)
        if episode in self._again:  # the others of its group wait for it
            self._again.discard(episode)
            self._queue.appendleft(new)
        else:
            self._queue.append(new)
        self._dispatch()

    def cancel(self, episode: str) -> None:
        self._forget(episode)
        if (found := self._named.pop(episode, None)) is None:
            return
        if found.player is None:
            self._queue.remove(found)
            return
        found.cancelled, found.stopped_s = True, 0.0
        self._gate.seal(episode)
        found.player.send(Cancel(found.number))

    async def close(self) -> None:
        """Stop every worker. What has no outcome gets none."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        self._named.clear()
        self._queue.clear()
        for task in self._adding:
            task.cancel()  # not those that end workers: a worker must not outlive the pool
        ends = (player.end() for player in self._players)
        await asyncio.gather(*self._adding, *self._ending, *ends, return_exceptions=True)
        self._players.clear()
        self._playing.clear()

    # What workers report

    def heard(self, player: Player, message: Entered | Ended) -> None:
        episode = self._playing[message.number]
        if isinstance(message, Entered):
            episode.phase = message.phase
            if not episode.cancelled:
                episode.stopped_s = None
            return
        del self._playing[message.number]
        player.numbers.discard(message.number)
        if not episode.cancelled:
            self._end(episode, message.outcome or failed("its worker cancelled it"))
        self._dispatch()

    def lost(self, player: Player, why: str) -> None:
        self._lose(player, why, None)

    # Within

    def _dispatch(self) -> None:
        if self._queue:
            self._grow()
        while self._queue and (there := [each for each in self._players if each.hears]):
            player = min(there, key=lambda each: len(each.numbers))
            if len(player.numbers) >= self.options.episodes:
                return
            self._give(player, self._queue.popleft())

    def _give(self, player: Player, episode: Episode) -> None:
        name, problem = episode.name, episode.problem
        prompt = list(problem.prompt) if isinstance(problem.prompt, tuple) else problem.prompt
        begin = Begin(episode.number, name, prompt, dict(problem.facts), self._gate.url, self._gate.open(name))
        try:
            frame = pack(begin)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._end(episode, failed(f"its row cannot be sent to a worker ({error}): keep to JSON values"))
            return
        episode.player = player
        player.numbers.add(episode.number)
        self._playing[episode.number] = episode
        player.send_frame(frame)

    def _end(self, episode: Episode, outcome: Outcome) -> None:
        self._forget(episode.name)
        if outcome.kind == "failed":
            self._again.add(episode.name)
        self._tell(episode, self._on_outcome, outcome)

    def _tell(self, episode: Episode, told: Callable[..., None], *more: Outcome) -> None:
        del self._named[episode.name]
        self._gate.seal(episode.name)
        try:
            told(episode.name, episode.attempt, *more)
        except Exception as error:  # the callback must not stop the worker
            context = {"message": f"the callback for the end of {episode.name} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _forget(self, episode: str) -> None:
        self._again.discard(episode)
        self._lost_once.discard(episode)

    def _tick(self) -> None:
        """Time in which this loop itself was held up is nobody's."""
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        for episode in list(self._playing.values()):
            if episode.number not in self._playing:
                continue  # its worker was killed just now
            if episode.stopped_s is not None:
                episode.stopped_s += self._tick_s
                if episode.stopped_s > self._grace_s:
                    self._kill_for(episode)
            elif episode.phase != "agent" or not self._gate.calls(episode.name):
                spent = episode.spent[episode.phase] = episode.spent.get(episode.phase, 0.0) + self._tick_s
                if spent > self._limits[episode.phase] and episode.player is not None:
                    episode.stopped_s = 0.0
                    episode.player.send(Over(episode.number))

    def _kill_for(self, episode: Episode) -> None:
        """An episode does not end, although it was told to."""
        assert episode.player is not None
        limit = f"environment.{episode.phase}_s={self._limits[episode.phase]:g}"
        why = "went on after it was cancelled" if episode.cancelled else f"took more than {limit} and did not stop"
        self._lose(episode.player, f"its {episode.phase} {why}", episode)

    def _lose(self, player: Player, why: str, blamed: Episode | None) -> None:
        """Without anybody to blame, it is the only one, if there is only one."""
        if player not in self._players:
            return
        self._players.discard(player)
        self._on_worker_lost(why if blamed is None else f"killed, as {blamed.name}: {why}")
        for number in sorted(player.numbers):
            episode = self._playing.pop(number)
            if episode.cancelled:
                continue
            if episode is blamed or len(player.numbers) == 1 or episode.name in self._lost_once:
                self._end(episode, failed(why))
            else:
                self._again.add(episode.name)
                self._lost_once.add(episode.name)
                self._tell(episode, self._on_lost)
        self._begin(player.end(), self._ending)
        self._grow()

    def _grow(self) -> None:
        while not self._closed and len(self._players) + self._starting < self.options.workers:
            self._starting += 1
            self._begin(self._add(), self._adding)

    async def _add(self) -> None:
        """Start one more worker. If that fails, so does the first episode that waits for it."""
        try:
            self._players.add(await Player.start(self.options, self._stderr, self))
        except (ConfigError, OSError) as error:
            if self._queue:
                self._end(self._queue.popleft(), failed(f"no worker could be started ({error})"))
        finally:
            self._starting -= 1
        self._dispatch()

    def _begin(self, change: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(change)
        among.add(task)
        task.add_done_callback(among.discard)
