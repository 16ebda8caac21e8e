"""What the processes of a run say, and what comes of it.

    hearing = Hearing(run)
    crew.start("trainer", "trainer", hearing.trainer, lambda _: None)
    control.recover(steps, hearing.early)

What instances report before the training begins is kept in ``early``: those that an earlier control plane started say
again what it may not have heard, or not have lived to write down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from staleflow.runtime.local.process import Child
from staleflow.runtime.local.remote import RemoteInstance
from staleflow.types import Evaluated, Moved, Pushed, Ready, Report, Saved, Trained
from staleflow.workers.rollout import stream_s

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun

MOST_FAILURES = 256
"""A reward that fails so often in a row is not unlucky but broken."""


class Hearing:
    def __init__(self, run: LocalRun) -> None:
        self.early: list[Report] = []
        self.scored = 0
        """Responses."""
        self._failures = 0
        """Rewards that failed since the last one that did not."""
        self._run = run

    # Instances

    def instance(self, child: Child, message: Any) -> None:
        if not isinstance(message, Report):
            return
        run, now = self._run, self._run.loop.time()
        port = run.instances.get(child.name)
        if port is None or port.child is not child:
            run.time.count_instances()
            every_s = stream_s(run.config.rollout.instances)
            port = run.instances[child.name] = RemoteInstance(child, child.setup.incarnation, every_s)
        port.hear(message)
        run.costs.hear(message.costs)
        if message.costs.tokens:
            run.crew.engine_works(child.name)
        run.watchdog.done(child.name, "report", now)
        run.watchdog.asked(child.name, "report", "its next report", now)
        if not run.training:
            self.early.append(message)
        elif port.joined:
            run.control.on_report(message)
        if not child.adopted or message.held is not None:
            child.ready.set()
            run.crew.optional.discard(child.name)  # it works: from now on the run counts on it
        trusted = child.ready.is_set() and run.crew.restarts.trusted(child.name, now - port.since)
        if run.training and trusted and not port.joined:
            run.join(port)
            if child.name in run.crew.leaving:
                run.control.drain(child.name)

    def bad_report(self, instance: str, kind: str, why: str) -> None:
        self._run.kept.counted("failures", "instance", kind)
        self._run.incidents.rarely("report", f"{instance}: {kind}: {why}", self._run.loop.time())

    def instance_ended(self, child: Child) -> None:
        run = self._run
        if (port := run.instances.get(child.name)) is not None:
            run.record.tokens_lost += port.unseen()
            run.record.instance_busy_s += port.busy_s
            port.busy_s = 0.0
        if run.training:
            run.control.left(child.name)

    # The trainer

    def trainer(self, child: Child, message: Any) -> None:
        run = self._run
        match message:
            case Ready(version=version):
                run.trainer.made(version)
                child.ready.set()
                if run.started:
                    self.trainer_back(version)
            case Pushed(version=version):
                run.trainer.made(version)
                self._trainer_did("feed", "finish")
                if run.started:  # before that, the control plane finds it out when it recovers
                    run.control.on_pushed(version)
            case Trained():
                if message.step >= run.server.ledger.version:  # others are made again
                    run.kept.trained(message, run.time.seconds, run.time.so_far())
            case Saved():
                self._trainer_did("save")
                if not message.why:
                    run.server.forget(message.version)
                run.saving.heard(message)
            case Moved(handled=handled, why=why, saves=saves):
                if saves:
                    run.watchdog.begun(child.name, "save")
                if why:
                    run.incidents.rarely("trainer", f"paused: {why}: make room", run.loop.time())
                if run.trainer.has_done(handled):
                    self._trainer_did("feed")

    def trainer_asked(self, kind: str, what: str, size: float) -> None:
        self._run.watchdog.asked("trainer", kind, what, self._run.loop.time(), size, begun=kind != "save")

    def _trainer_did(self, *kinds: str) -> None:
        for kind in kinds:
            self._run.watchdog.done("trainer", kind, self._run.loop.time())

    def trainer_back(self, version: int) -> None:
        """Another trainer has taken over. What was sent to the dead one was sent to nobody."""
        run = self._run
        if run.remaking.brings_back:
            return  # with this one, from where it is
        if version < run.server.ledger.version:
            run.incidents.note(f"the trainer was replaced at version {version}: the steps since then are made again")
            run.control.on_trainer_lost()
            run.remaking.bring_back()
            return
        run.incidents.note(f"the trainer was replaced at version {version}")
        if run.rescue.begun:
            run.control.on_trainer_lost()
            run.control.stop()
        elif run.training:
            run.control.on_trainer_lost()
            run.control.on_trainer_back()
        run.saving.trainer_back(version)

    # The evaluator

    def evaluator(self, child: Child, message: Any) -> None:
        match message:
            case Ready():
                child.ready.set()
                self._run.evaluating.asked.back()
            case Evaluated():
                self._evaluated(message)
            case Moved(why=why) if why:
                self._run.incidents.rarely("evaluator", f"the evaluation waits: {why}", self._run.loop.time())

    def _evaluated(self, message: Evaluated) -> None:
        run = self._run
        run.crew.engine_works("evaluator")
        run.evaluating.asked.answered(message.version)
        if not run.evaluating.asked.open:
            run.watchdog.done("evaluator", "evaluate", run.loop.time())
        if message.failed:
            what = f"{message.failed} held-out responses of version {message.version}"
            run.failed("evaluation", "responses not scored", f"{what} could not be scored, last: {message.why}")
        if message.trouble:
            run.failed("checkpoint", "best not written", message.trouble)
        if message.accuracy is None:
            return
        run.kept.evaluated(message.version, message.accuracy, message.figures, message.binary)
        figures = {"step": message.version, **message.figures}
        run.trackers.log(message.version, {f"evaluation/{name}": value for name, value in figures.items()})
        if (why := self._enough(message)) and run.training:
            run.incidents.note(f"the run ends early: {why}")
            run.stopped_early = why
            run.control.stop()

    def _enough(self, message: Evaluated) -> str:
        """Why the run need not continue, if so."""
        config = self._run.config
        goal, patience, figure = config.stop_at, config.evaluation.patience, config.evaluation.figure
        value = message.figures.get(figure)
        if value is None:
            self._run.incidents.note(f"{figure} was not measured: it is for rewards of 0 and 1")
        elif goal is not None and value >= goal:
            return f"{figure} of version {message.version} is {value:.4g}, and stop_at={goal:g}"
        elif patience and self._run.record.without_better(figure) >= patience:
            return f"{figure} has not become better in {patience} evaluations (evaluation.patience)"
        return ""

    # Reward workers

    def reward(self, name: str, reward: float, parts: tuple[float, ...]) -> None:
        self._failures = 0
        self.scored += 1
        if name in self._run.payloads:  # otherwise its group was given up
            self._run.samples.scored(name, parts, self._run.payloads.bytes_of(name)[0])
        self._run.control.on_scored(name, reward)

    def played(self, episode: str) -> None:
        """An environment has scored an episode."""
        run = self._run
        self.scored += 1
        if episode in run.payloads:
            run.samples.scored(episode, (), run.payloads.bytes_of(episode)[0])

    def reward_failed(self, name: str, why: str) -> None:
        run = self._run
        if run.control.over:
            return
        self._failures += 1
        run.kept.counted("failures", "reward", "not scored")
        run.incidents.rarely("reward", f"reward of {name} failed: {why}", run.loop.time())
        if (away_s := run.pool.away_s) >= run.config.reward.patience_s > 0:
            away = f"the reward service has been away for {away_s:.0f} s (reward.patience_s)"
            run.rescue.never_scored(f"{away}, last: {why}")
        elif self._failures >= MOST_FAILURES:
            log = run.directory.log("reward")
            run.rescue.never_scored(f"the reward failed {self._failures} times in a row, last: {why} (see {log})")
        run.control.on_score_failed(name, why)

    def reward_away(self, why: str) -> None:
        run = self._run
        run.kept.counted("failures", "reward", "service away")
        left = run.config.reward.patience_s - run.pool.away_s
        run.incidents.rarely("away", f"{why}; asked again for {left:.0f} s", run.loop.time())

    def reward_worker_lost(self, why: str) -> None:
        """One that was killed for its silence, or died by itself; another is started for the next response."""
        run = self._run
        run.kept.counted("restarts", "reward", why.partition(" (")[0] if "nonsense" in why else why)
        run.incidents.rarely("reward worker", f"a reward worker was lost: {why}; started again", run.loop.time())
