"""Who watches over a run while it runs: deaths, processes that stand still, the disk, and the run as a whole.

watching = Watching(run)
crew = Crew(..., on_death=watching.death)
await watching.keep_watching()
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from staleflow.run.fleet import FleetLog, moment_of
from staleflow.runtime.control import StalledError
from staleflow.runtime.local.process import Child
from staleflow.runtime.local.status import status_of
from staleflow.runtime.watchdog import Looks

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun

VIEW_S = 0.25
LOOKED_S = 5.0
"""Somebody looks if ``staleflow dash`` has said so within this time."""
QUIET_S = 15.0
"""Without a token, a reward or a version for this long, the run says what it waits for."""
STALL_S = 1800.0
"""And for this long, it ends. Every process may work and the run stand still all the same: that is a bug,
and not one to wait for in silence."""


class Watching:
    def __init__(self, run: LocalRun) -> None:
        self.shown_s = 0.0
        """CPU seconds for what people look at."""
        self._run = run
        self._fleet = FleetLog(run.directory.fleet, on_trouble=run.incidents.note)
        self._sign: tuple[float, ...] = ()
        """How far the run was when it last moved."""
        self._moved_at = 0.0
        self._looks = Looks(run.watchdog.interval_s)
        self._paused = False

    def death(self, child: Child, how: str, pause_s: float | None) -> None:
        run, name, role = self._run, child.name, child.setup.role
        run.kept.counted("restarts", role, how)
        how = f"stood still ({child.hung}) and was killed" if child.hung else f"died: {how}"
        words = f": {said}" if (said := child.last_words()) else ""
        after = "" if child.broken or pause_s is None else "; started again" + (f" in {pause_s:g} s" if pause_s else "")
        run.incidents.note(f"{name} {how}{words}{after}")
        if role == "trainer" and not run.config.processes.with_standby and not child.broken:
            run.crew.fail(f"the trainer {how}{words}, and processes.standby is off (see {child.log})")
        elif role == "instance" and name in run.crew.leaving:
            run.scaling.drained(name)
        elif role == "instance" and name in run.crew.optional and pause_s is None:
            run.scaling.given_up(name, f"{how}{words} (see {child.log})")
        elif role == "evaluator" and pause_s is None:
            run.evaluating.asked.end(f"the evaluator {how}{words} (see {child.log})")

    async def keep_watching(self) -> None:
        run = self._run
        while True:
            await asyncio.sleep(run.watchdog.interval_s)
            for each in run.crew.look():
                if each.news and not each.lost:
                    run.incidents.note(str(each))
            for child in run.crew.children.values():
                if child.waits_for and run.loop.time() - child.waits_since > QUIET_S:
                    what = f"{child.name} waits for {child.waits_for}"
                    run.incidents.rarely(f"place of {child.name}", what, run.loop.time())
            run.crew.keep(run.journal.position, run.journal.durable)
            run.steps.write()
            if run.started:
                run.scaling.look()
            self.disk()
            run.rescue.look(run.loop.time())
            self.moves(run.loop.time())

    async def keep_showing(self) -> None:
        while True:
            began = time.process_time()
            self._run.show(self._run)
            self._record()
            self.shown_s += time.process_time() - began
            await asyncio.sleep(VIEW_S)

    def _record(self) -> None:
        """What instances do now, for those who look; while somebody does, events are not kept waiting either."""
        run, watched = self._run, self._watched()
        if self._fleet.due(run.loop.time(), len(run.instances), watched):
            self._fleet.write(moment_of(status_of(run), time.time()))
            if watched:
                run.journal.hurry()

    def _watched(self) -> bool:
        try:
            return time.time() - os.stat(self._run.directory.watched).st_mtime < LOOKED_S
        except OSError:
            return False

    def disk(self) -> None:
        """The journal holds back whatever rests on what it cannot write, so a run on a full disk pauses."""
        trouble = self._run.journal.trouble or self._run.steps.trouble
        if trouble and not self._paused:
            self._run.failed("disk", "not written", f"paused: {trouble}")
        elif self._paused and not trouble:
            self._run.incidents.note("there is room on the disk again: the run continues")
        self._paused = bool(trouble)

    def moves(self, now: float) -> None:
        """Whether the run does, as a whole."""
        run = self._run
        tokens = sum(port.tokens for port in run.instances.values())
        starts = sum(run.crew.incarnations.values())
        sign = (run.server.ledger.version, tokens, run.hearing.scored, starts, run.record.tokens_wasted)
        others = self._paused or run.pool.pending or run.watchdog.busy("trainer")  # who have limits of their own
        if sign != self._sign or others or not run.training:
            self._sign, self._moved_at = sign, now
        self._moved_at = min(now, self._moved_at + self._looks.stood_still(now))
        quiet_s = now - self._moved_at
        if quiet_s >= QUIET_S:
            why = f"nothing has moved for {quiet_s:.0f} s; waits for {run.control.watch.waits_for()}"
            run.incidents.rarely("quiet", why, now)
        if quiet_s >= STALL_S:
            run.crew.fail(StalledError(f"nothing has moved for {quiet_s:.0f} s: {run.control.watch.stalled()}"))
