"""The last checkpoint of a run, whether it ended well or failed.

await rescue.save_last()            # it ended, or somebody stopped it
where = await rescue.rescued()      # it has failed: what can be saved is, with the trainer or with another one
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from staleflow.errors import INTERRUPTED, RunError, line_of
from staleflow.run.checkpoints import newest
from staleflow.run.continuing import continuing

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun

RESCUE_S = 300.0
"""For the checkpoint of a run that has failed."""
RETRY_S = 5.0
"""The last checkpoint is tried again this often on a full disk."""
STOPPED_S = 30.0
"""And for no longer than this once somebody has asked the run to stop; the same holds for the step in training."""


class Interrupted(RunError):  # noqa: N818  # an event, not a mistake
    """Stopped before there was anything to save, or where nothing can be."""

    exit_code = INTERRUPTED


class Rescue:
    def __init__(self, run: LocalRun) -> None:
        self.begun = False
        """Whether the run has failed and is being saved."""
        self._run = run
        self._no_room_since: float | None = None
        """When somebody who wants the run to end began to wait for room on the disk."""

    def look(self, now: float) -> None:
        """Somebody who stops a run on a full disk does not wait for room for ever: the journal has all but the end."""
        run = self._run
        if not (run.training and run.interrupted and run.journal.trouble):
            self._no_room_since = None
        elif self._no_room_since is None:
            self._no_room_since = now
            run.incidents.note(f"the step in training cannot be written: ends in {STOPPED_S:g} s if there is no room")
        elif now - self._no_room_since > STOPPED_S:
            run.crew.fail(Interrupted(f"stopped by {run.stopped_by} without room on the disk: {run.journal.trouble}"))

    def never_scored(self, why: str) -> None:
        """Reward or environment fail all the time, which ends the run; not again while it is saved without them."""
        if not self.begun:
            self._run.crew.fail(why)

    async def save_last(self) -> None:
        """On a full disk it is waited for, for a while only if somebody wants the run to end."""
        run = self._run
        began = run.loop.time()
        while why := await self._saved():
            run.incidents.rarely("last", "the last checkpoint is tried again and again: make room", run.loop.time())
            if run.interrupted and run.loop.time() - began > STOPPED_S:
                raise RunError(f"the last checkpoint could not be written: {why}")
            await run.crew.within(asyncio.sleep(RETRY_S), "pause")

    async def _saved(self) -> str:
        asked = self._run.saving.ask(self._run.server.ledger.version)
        await self._run.crew.within(asked.wait(), "last checkpoint")
        return asked.why

    async def rescued(self) -> str:
        """The run has failed. Save what it has made; says where one continues."""
        run, why = self._run, ""
        ledger = run.server.ledger
        no_room = run.interrupted and run.journal.trouble  # nor for a checkpoint
        if no_room:
            why = "what could not be written is made again"
        elif not run.directory.checkpoint(ledger.version).is_dir() or ledger.version < ledger.frontier:
            run.incidents.note("the run cannot continue: its last version is being saved")
            self.begun = True
            run.crew.only("trainer")
            try:
                await run.crew.within(self._rescue(), "checkpoint after the failure", RESCUE_S)
            except Exception as error:
                why = f"the steps since then could not be saved ({line_of(error)})"
        latest = newest(run.directory.checkpoints)
        where = latest.name if latest is not None else "the journal (there is no checkpoint)"
        resume = f"continue from {where} with: {continuing(run.directory.path, run.config.reward)}"
        return f"{why}; {resume}" if why else resume

    async def _rescue(self) -> None:
        run = self._run
        trainer = run.crew.children["trainer"]
        if trainer.broken or trainer.ended.is_set():
            await trainer.how_it_ended()
            if not run.config.processes.with_standby:
                raise RunError("the trainer is gone, and processes.standby is off")
            run.start_trainer()
        else:
            run.control.stop()
        await run.control.ended()
        if why := await run.saving.ask(run.server.ledger.version).wait():
            raise RunError(why)
