"""Steps that are committed and that a trainer lacks: it is fed what they were made of. Nothing else comes of them.

await remaking.all()        # before training
remaking.bring_back()       # a trainer that begins before the present version, while training
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from staleflow.errors import RunError
from staleflow.runtime.local.rescuing import Interrupted
from staleflow.servers.made import rows_of

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun


class Remaking:
    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._bringing: asyncio.Task[None] | None = None
        self.brings_back = False
        """Whether a trainer makes steps again beside the run."""

    async def all(self) -> None:
        run = self._run
        while (step := run.trainer.at) < run.server.ledger.version:
            if run.interrupted and not self.brings_back:
                raise Interrupted(f"stopped by {run.stopped_by} while steps were made again: nothing is lost")
            run.now(f"makes step {step} again")
            if (made := run.server.made.get(step)) is None:
                raise RunError(f"the trainer is at version {step}, and the journal does not have this step: resume")
            run.trainer.news.clear()
            run.trainer.make_again(step, rows_of(made, run.journal))
            await run.crew.within(run.trainer.news.wait(), f"step {step}, made again")

    def bring_back(self) -> None:
        """The trainer makes the steps since its version, and continues."""

        async def bring() -> None:
            await self.all()
            self.brings_back = False
            self._run.hearing.trainer_back(self._run.trainer.at)

        self.brings_back = True
        self._bringing = self._run.beside(bring(), "steps made again")
