"""Which versions of a run are evaluated, and when: before the first step, every so many, and the last.

evaluating.asked                    # what the evaluator has not answered yet
await evaluating.present()          # the version that is there now, before the run goes on
evaluating.if_due(version)          # beside the run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from staleflow.runtime.local.evaluations import Evaluations
from staleflow.types import Evaluate

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun


class Evaluating:
    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self.asked = Evaluations(self._send, self._missing)

    async def present(self) -> None:
        """Of the version that is there now; whatever the evaluator was asked before is answered first."""
        run = self._run
        version = run.server.ledger.version
        if not run.interrupted and not self._known(version):
            run.now(f"evaluates version {version} on {len(run.task.held_out)} held-out problems")
            self.asked.ask(version)
            await run.crew.within(self.asked.settled(version), "evaluation")

    def if_due(self, version: int) -> None:
        config = self._run.config
        every = config.evaluation.every
        if every and version % every == 0 and version < config.steps and not self._known(version):
            self.asked.ask(version, now=config.evaluation.when == "during")

    def _known(self, version: int) -> bool:
        return any(each[0] == version for each in self._run.record.accuracy)

    def _send(self, now: bool) -> None:
        run = self._run
        child = run.crew.children["evaluator"]
        if child.ready.is_set():  # another one is asked when it is ready
            run.watchdog.asked("evaluator", "evaluate", "evaluation", run.loop.time())
            if now:
                run.server.note("evaluating", run.server.ledger.version)
            child.send(Evaluate(now))

    def _missing(self, version: int, why: str) -> None:
        self._run.failed("evaluation", "missing", f"the evaluation of version {version} is missing: {why}")
