"""The environments of a run: the endpoint that serves its episodes, and the pool that plays them.

    playing = Playing(run)                      # where environment.play is given
    control = ControlPlane(..., environments=playing.environments)
    await playing.start()

What becomes of an episode is the control plane's (``runtime/episodes.py``); what goes wrong is told and counted here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from staleflow.agents.endpoint import Endpoint
from staleflow.agents.outcome import Outcome
from staleflow.agents.pool import EnvironmentPool
from staleflow.agents.render import opened
from staleflow.runtime.episodes import Environments, Episodes
from staleflow.runtime.local.hearing import MOST_FAILURES

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun

LOG = "environment"


class Playing:
    def __init__(self, run: LocalRun) -> None:
        config = run.config
        self._run = run
        self._options = config.environment
        stops = run.task.stop_tokens
        self._renderer = opened(run.model, stops, self._options)
        self._sampling = config.sampling(stops)
        self._failures = 0
        """Of episodes, since the last one that did not fail."""
        self._log = os.open(run.directory.log(LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        ended, lost = run.crew.fatal(self._ended), run.crew.fatal(self._lost)
        self._pool = EnvironmentPool(self._options, self, ended, lost, self._log, self._worker_lost)
        self._endpoint: Endpoint | None = None
        self.environments = Environments(
            self._pool,
            lambda prompt: run.task.conversation(run.task.prompts.problem(prompt)),
            self._options.tries,
            self._options.truncated == "mask",
            run.outbox.send,
        )

    async def start(self) -> None:
        self._endpoint = Endpoint(self._episodes, self._renderer, self._sampling, max_turns=self._options.max_turns)
        await self._endpoint.start()
        await self._pool.start()
        self._episodes.on_failed = self._failed
        self._episodes.on_outcome = self._scored

    async def close(self) -> None:
        await self._pool.close()
        if self._endpoint is not None:
            await self._endpoint.close()
        os.close(self._log)

    # The endpoint, as the pool sees it

    @property
    def url(self) -> str:
        return self._served.url

    def open(self, episode: str) -> str:
        return self._served.open(episode)

    def seal(self, episode: str) -> None:
        self._served.seal(episode)

    def calls(self, episode: str) -> int:
        return self._served.calls(episode)

    # What becomes of episodes

    def _ended(self, episode: str, attempt: int, outcome: Outcome) -> None:
        self._episodes.outcome(episode, attempt, outcome)

    def _lost(self, episode: str, attempt: int) -> None:
        self._episodes.lost(episode, attempt)

    def _scored(self, episode: str, _outcome: Outcome) -> None:
        self._failures = 0
        self._run.hearing.played(episode)

    def _failed(self, episode: str, why: str) -> None:
        run = self._run
        self._failures += 1
        run.kept.counted("failures", LOG, "episode failed")
        run.incidents.rarely(LOG, f"episode {episode} failed: {why}", run.loop.time())
        if self._failures >= MOST_FAILURES:
            log = run.directory.log(LOG)
            run.rescue.never_scored(f"{self._failures} episodes failed in a row, last: {why} (see {log})")

    def _worker_lost(self, why: str) -> None:
        run = self._run
        run.kept.counted("restarts", LOG, why)
        run.incidents.rarely("environment worker", f"an environment worker was lost: {why}", run.loop.time())

    @property
    def _episodes(self) -> Episodes:
        assert self._run.control.episodes is not None
        return self._run.control.episodes

    @property
    def _served(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint
