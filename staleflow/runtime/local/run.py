"""A run on this machine: the control plane in this process, every other role in one of its own.

    run = LocalRun(config, directory, model_folder, task, cost)
    summary = run_patiently(run.execute())

Processes that die or stand still are replaced, and nobody's work is lost: trajectories continue elsewhere, and a new
trainer takes over the last version with everything that belongs to it. Whatever else ends a run (Ctrl-C, SIGTERM,
SIGHUP, a failure that it cannot survive) leaves a checkpoint, or the message says that none could be made.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from staleflow.config import Config
from staleflow.config.machine import free_memory
from staleflow.config.memory import trajectory_bytes
from staleflow.coordinator.cost import CostModel
from staleflow.errors import StaleFlowError, line_of
from staleflow.protocol import StalenessLedger
from staleflow.reward.pool import PoolPort, RewardPool
from staleflow.run.checkpoints import newest
from staleflow.run.costs import RunCosts
from staleflow.run.decisions import DecisionLog
from staleflow.run.directory import RunDirectory
from staleflow.run.incidents import Incidents, count
from staleflow.run.origin import ORIGIN, origin_of
from staleflow.run.parts import sizes
from staleflow.run.record import Record
from staleflow.run.state import STATE, pack_state, unpack_state
from staleflow.run.step_log import StepLog
from staleflow.runtime.control import ControlPlane, Settings, StalledError
from staleflow.runtime.local.crew import Crew, RunError
from staleflow.runtime.local.evaluations import Evaluations
from staleflow.runtime.local.placement import placement
from staleflow.runtime.local.process import Child
from staleflow.runtime.local.remote import RemoteInstance, RemoteTrainer
from staleflow.runtime.local.saving import Saving
from staleflow.runtime.local.stillness import QUIET_S, STALL_S, Stillness
from staleflow.runtime.outbox import HeldTrainer, Outbox
from staleflow.runtime.watchdog import Watchdog
from staleflow.servers.book import let_go
from staleflow.servers.database import JournalError
from staleflow.servers.durable import DurableJournal
from staleflow.servers.filters import FILTERS
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.servers.weights import claim, standby_of
from staleflow.tasks.opening import TaskSet, decoder_of
from staleflow.types import Evaluate, Evaluated, Moved, Pushed, Ready, Report, Saved, Trained

__all__ = ["LocalRun", "RunError"]

START_S = 300.0
RESCUE_S = 300.0
"""For the checkpoint of a run that has failed."""
RETRY_S = 5.0
"""The last checkpoint is tried again this often on a full disk."""
STOPPED_S = 30.0
"""And for no longer than this once somebody has asked the run to stop."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CYCLE_S = 0.05
"""Decisions are made at most this often: steps of a laptop run take a fraction of a second."""
MOST_FAILURES = 256
"""A reward that fails so often in a row is not unlucky but broken."""
VIEW_S = 0.25
LAZY_S = 0.25
"""Only the trainer waits for the journal: instances and reward workers end with this process, so whatever they have
heard that was not durable is forgotten on both sides."""


class Interrupted(RunError):  # noqa: N818  # an event, not a mistake
    """Stopped before there was anything to save."""

    exit_code = 130


class LocalRun:
    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        model: Path,
        task: TaskSet,
        cost: CostModel,
        checkpoint: Path | None = None,
        show: Callable[[LocalRun], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``cost`` is a first guess of what a decoding step takes; ``show`` is called a few times a second; ``tell``
        gets a line for everything that goes wrong."""
        self.config = config
        self.directory = directory
        self.task = task
        self.show = show
        self.record = Record(config.staleness)
        self.instances: dict[str, RemoteInstance] = {}
        self.interrupted = False
        self.stopped_by = ""
        """The signal."""
        self.incidents = Incidents(tell)
        self.watchdog = Watchdog(lost_s=config.processes.hung_s)
        self._model = model
        self._cost = cost
        self._checkpoint = checkpoint
        self._origin = origin_of(config, task.fingerprint, model)
        self._steps = StepLog(directory.metrics)
        self._decisions = DecisionLog(directory.decisions, on_trouble=self.incidents.note)
        self.training = False
        self._started = self._rescuing = False
        self._stillness = Stillness()
        self._began = self._cpu_began = 0.0
        self._before_s = 0.0
        """Seconds of training in earlier attempts of the run."""
        self._shown_s = 0.0
        """CPU seconds for what people look at."""
        self._report: Trained | None = None
        """What the trainer said of the latest step."""
        self._failures = 0
        """Rewards that failed since the last one that did not."""
        self._scored = 0
        self._paused = False
        self.costs = RunCosts()

    async def execute(self) -> dict[str, Any]:
        """The whole run. Returns its summary."""
        self._loop = asyncio.get_running_loop()
        config = self.config
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
        places = placement(cores, config.rollout.instances, config.processes.threads, config.processes.pin)
        self.crew = Crew(self.directory, self._model, places, self.watchdog, self._on_death, self._checkpoint)
        store = self.directory.store
        with claim(store), claim(standby_of(store)):
            self._open()
            for each in SIGNALS:
                self._loop.add_signal_handler(each, self._interrupt, each)
            beside = [self._beside(self._show_for_ever(), "view"), self._beside(self._watch_for_ever(), "watch")]
            try:
                await self._run()
            except Exception as error:
                if self._began:
                    _add(error, await self._rescued())
                raise
            finally:
                for task in beside:
                    task.cancel()
                await self._close()
                for each in SIGNALS:
                    self._loop.remove_signal_handler(each)
        self._write_profile()
        return self.summary()

    async def _run(self) -> None:
        await self.crew.within(self._start(), "start of all processes", START_S)
        self._started = True
        self.crew.optional.add("evaluator")
        await self._evaluate()
        await self._train()
        await self._save_last()
        await self._evaluate()

    def _beside(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Something that runs as long as the run does; if it cannot, that is a mistake of ours, and ends it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.crew.fail(error if isinstance(error, Exception) else str(error))

        task = self._loop.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    def summary(self) -> dict[str, Any]:
        if self._pool.replaced:
            self.record.restarts["reward"] = dict(self._pool.replaced)
        return self.record.summary(self.server.ledger.counts()) | self._for_the_simulator()

    def _for_the_simulator(self) -> dict[str, Any]:
        """How large the run was and what things took: what ``staleflow.study.measured`` reads."""
        return sizes(self.config) | {"cycle_s": CYCLE_S} | self.costs.means()

    def _write_profile(self) -> None:
        """What the engines' steps took here, unless there were too few to tell."""
        rollout = self.config.rollout
        if (found := self.costs.profile(by_cpu=rollout.device == "cpu")) is not None:
            about = {"model": self.config.model, "device": rollout.device, "dtype": rollout.dtype}
            about |= {"date": time.strftime("%Y-%m-%d")}
            with suppress(OSError):
                self.directory.write(self.directory.profile, about | found)

    # Setting up

    def _open(self) -> None:
        """The state of the run: empty, or that of the checkpoint."""
        config = self.config
        self._attempt = self.directory.lives + 1
        self.journal = DurableJournal(self.directory.journal(self._attempt), lazy_s=LAZY_S)
        memory = trajectory_bytes(config, free_memory())
        limits = Limits(config.rollout.max_tokens, self.task.max_prompt_tokens, self.task.vocab_size, memory)
        ledger = StalenessLedger(config.groups, config.staleness, config.redundancy)
        self.payloads = Payloads(limits)
        self.server = TrajectoryServer(ledger, config.group_size, config.extra_members, self.journal, self.payloads)
        if self._checkpoint is not None:
            self.record = unpack_state((self._checkpoint / STATE).read_bytes(), self.server, self.journal)
            self.record.lives = self._attempt
            self._before_s = self.record.seconds
        self.server.on_committed = self._committed
        self.server.on_aborted = self._aborted
        self.outbox = Outbox(self.journal)
        self.journal.on_durable = self.outbox.waker(self._loop)
        self._trainer = RemoteTrainer(self.crew, self.server, self.server.ledger.version, self._trainer_asked)
        self._saving = Saving(
            self.directory,
            config.checkpoints,
            lambda: {STATE: pack_state(self.server, self.record), ORIGIN: self._origin},
            lambda folder, also: self.outbox.send(self._trainer.save, folder, also),
            lambda why, line: self._failed("checkpoint", why, line),
        )
        self._evaluations = Evaluations(self._send_evaluate, self._evaluation_missing)
        self._log = os.open(self.directory.log("reward"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pool = RewardPool(
            config.reward,
            self._on_scored,
            self._on_score_failed,
            stderr=self._log,
            decoder=decoder_of(config.data, self._model),
            on_away=self._reward_away,
        )
        self.control = self._control()

    def _control(self) -> ControlPlane:
        config = self.config
        port = PoolPort(self._pool, self.task.prompts.problem, self.payloads.token_bytes)
        settings = Settings(
            config.strategies,
            self._cost,
            cycle_s=CYCLE_S,
            stall_s=STALL_S,
            reward_timeout_s=2 * config.reward.timeout_s + 60 + config.reward.patience_s,
            reward_tries=config.reward.tries,
            pull_s=0.1,
        )
        trainer = HeldTrainer(self._trainer, self.outbox, self.costs.finish.add)
        control = ControlPlane(settings, self.server, trainer, port, self.task.prompts, term=self._attempt)
        control.scoring.on_answer = self.costs.reward.add
        control.reports.on_bad = self._bad_report
        control.on_decision = lambda _now, decision: self._decisions.write(self.seconds, decision)
        control.filter = FILTERS.bound(config.filter, {}, config.filter_arguments)
        return control

    async def _start(self) -> None:
        await self._start_trainer()
        for at in range(self.config.rollout.instances):
            await self.crew.start("instance", f"i{at}", self._from_instance, self._instance_ended)
        await self.crew.start("evaluator", "evaluator", self._from_evaluator, lambda _: self._evaluations.died())
        await self._pool.start()
        await self.crew.all_ready()

    async def _start_trainer(self) -> Child:
        return await self.crew.start("trainer", "trainer", self._from_trainer, lambda _: None)

    # What the processes say

    def _from_instance(self, child: Child, message: Any) -> None:
        match message:
            case Ready():
                self.instances[child.name] = RemoteInstance(child, self.crew.incarnations[child.name])
            case Report():
                port = self.instances[child.name]
                port.hear(message)
                self.costs.hear(message.costs)
                self.watchdog.done(child.name, "report", self._loop.time())
                self.watchdog.asked(child.name, "report", "its next report", self._loop.time())
                if not child.ready.is_set():
                    child.ready.set()
                    if self.training:
                        self.control.join(port)
                elif self.training:
                    self.control.on_report(message)

    def _bad_report(self, instance: str, kind: str, why: str) -> None:
        count(self.record.failures, "instance", kind)
        self.incidents.rarely("report", f"{instance}: {kind}: {why}", self._loop.time())

    def _instance_ended(self, child: Child) -> None:
        if (port := self.instances.get(child.name)) is not None:
            self.record.instance_busy_s += port.busy_s
        if self.training:
            self.control.left(child.name)

    def _from_trainer(self, child: Child, message: Any) -> None:
        match message:
            case Ready(version=version):
                child.ready.set()
                self._trainer.version = version
                if self.crew.incarnations[child.name] > 1:
                    self._trainer_back(version)
            case Pushed(version=version):
                self._trainer.version = version
                self._trainer_did("feed", "finish")
                self.control.on_pushed(version)
            case Trained():
                self._report = message
            case Saved():
                self._trainer_did("save")
                self._saving.heard(message)
            case Moved(handled=handled, why=why):
                if why:
                    self.incidents.rarely("trainer", f"paused: {why}: make room", self._loop.time())
                if self._trainer.has_done(handled):
                    self._trainer_did("feed")

    def _trainer_asked(self, kind: str, what: str, size: float) -> None:
        self.watchdog.asked("trainer", kind, what, self._loop.time(), size)

    def _trainer_did(self, *kinds: str) -> None:
        for kind in kinds:
            self.watchdog.done("trainer", kind, self._loop.time())

    def _trainer_back(self, version: int) -> None:
        """Another trainer has taken over. What was sent to the dead one was sent to nobody."""
        self.incidents.note(f"the trainer was replaced at version {version}")
        if self._rescuing:
            self.control.on_trainer_lost()
            self.control.stop()
        elif self.training:
            self.control.on_trainer_lost()
            self.control.on_trainer_back()
        self._saving.trainer_back(version)

    def _from_evaluator(self, child: Child, message: Any) -> None:
        match message:
            case Ready():
                child.ready.set()
                self._evaluations.back()
            case Evaluated():
                self._heard_evaluation(message)

    def _heard_evaluation(self, message: Evaluated) -> None:
        self._evaluations.answered(message.version)
        if not self._evaluations.open:
            self.watchdog.done("evaluator", "evaluate", self._loop.time())
        if message.failed:
            what = f"{message.failed} held-out responses of version {message.version}"
            self._failed("evaluation", "responses not scored", f"{what} could not be scored, last: {message.why}")
        if message.accuracy is None:
            return
        self.record.evaluated(message.version, message.accuracy)
        goal = self.config.stop_at
        if goal is not None and message.accuracy >= goal and self.training:
            self.control.stop()

    def _on_scored(self, name: str, reward: float) -> None:
        self._failures = 0
        self._scored += 1
        self.control.on_scored(name, reward)

    def _on_score_failed(self, name: str, why: str) -> None:
        if self.control.over:
            return
        self._failures += 1
        count(self.record.failures, "reward", "not scored")
        self.incidents.rarely("reward", f"reward of {name} failed: {why}", self._loop.time())
        if (away_s := self._pool.away_s) >= self.config.reward.patience_s > 0:
            self.crew.fail(f"the reward service has been away for {away_s:.0f} s (reward.patience_s), last: {why}")
        elif self._failures >= MOST_FAILURES:
            self.crew.fail(f"the reward failed {self._failures} times in a row, last: {why}")
        self.control.on_score_failed(name, why)

    def _reward_away(self, why: str) -> None:
        count(self.record.failures, "reward", "service away")
        left = self.config.reward.patience_s - self._pool.away_s
        self.incidents.rarely("away", f"{why}; asked again for {left:.0f} s", self._loop.time())

    # What goes wrong

    def _on_death(self, child: Child, how: str, pause_s: float | None) -> None:
        name, role = child.name, child.setup.role
        count(self.record.restarts, role, how)
        how = f"stood still ({child.hung}) and was killed" if child.hung else f"died: {how}"
        words = f": {said}" if (said := child.last_words()) else ""
        after = "" if child.broken or pause_s is None else "; started again" + (f" in {pause_s:g} s" if pause_s else "")
        self.incidents.note(f"{name} {how}{words}{after}")
        if role == "trainer" and not self.config.processes.standby and not child.broken:
            self.crew.fail(f"the trainer {how}{words}, and processes.standby is off (see {child.log})")
        elif role == "evaluator" and pause_s is None:
            self._evaluations.end(f"the evaluator {how}{words} (see {child.log})")

    def _failed(self, what: str, why: str, line: str) -> None:
        count(self.record.failures, what, why)
        self.incidents.note(line)

    async def _watch_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.watchdog.interval_s)
            for each in self.crew.look():
                if each.news and not each.lost:
                    self.incidents.note(str(each))
            self._steps.write()
            self._look_at_disk()
            self._look_at_run(self._loop.time())

    def _look_at_disk(self) -> None:
        """The journal holds back whatever rests on what it cannot write, so a run on a full disk pauses by itself."""
        trouble = self.journal.trouble or self._steps.trouble
        if trouble and not self._paused:
            self._failed("disk", "not written", f"paused: {trouble}")
        elif self._paused and not trouble:
            self.incidents.note("there is room on the disk again: the run continues")
        self._paused = bool(trouble)

    def _look_at_run(self, now: float) -> None:
        tokens = sum(port.tokens for port in self.instances.values())
        starts = sum(self.crew.incarnations.values())
        sign = (self.server.ledger.version, tokens, self._scored, starts, self.record.tokens_wasted)
        others = self._paused or self._pool.pending or self.watchdog.busy("trainer")  # who have limits of their own
        quiet_s = self._stillness.look(sign, now, excused=bool(others) or not self.training)
        if quiet_s >= QUIET_S:
            why = f"nothing has moved for {quiet_s:.0f} s; waits for {self.control.watch.waits_for()}"
            self.incidents.rarely("quiet", why, now)
        if quiet_s >= STALL_S:
            self.crew.fail(StalledError(f"nothing has moved for {quiet_s:.0f} s: {self.control.watch.stalled()}"))

    async def _rescued(self) -> str:
        """The run has failed. Save what it has made, with the trainer or with another one; says where one continues."""
        why = ""
        version = self.server.ledger.version
        if not self.directory.checkpoint(version).is_dir() or version < self.server.ledger.frontier:
            self.incidents.note("the run cannot continue: its last version is being saved")
            self._rescuing = True
            self.crew.only("trainer")
            try:
                await self.crew.within(self._rescue(), "checkpoint after the failure", RESCUE_S)
            except Exception as error:
                why = f"the steps since then could not be saved ({line_of(error)})"
        if (latest := newest(self.directory.checkpoints)) is None:
            return f"no checkpoint could be made: {why}" if why else "there is no checkpoint"
        resume = f"continue from {latest.name} with: staleflow train --resume {self.directory.path}"
        return f"{why}; {resume}" if why else resume

    async def _rescue(self) -> None:
        trainer = self.crew.children["trainer"]
        if trainer.broken or trainer.ended.is_set():
            await trainer.how_it_ended()
            if not self.config.processes.standby:
                raise RunError("the trainer is gone, and processes.standby is off")
            await self._start_trainer()
        else:
            self.control.stop()
        await self.control.ended()
        if why := await self._saving.ask(self.server.ledger.version).wait():
            raise RunError(why)

    # Training

    @property
    def loss(self) -> float | None:
        """Of the latest step."""
        return self._report.facts.get("loss") if self._report is not None else None

    @property
    def seconds(self) -> float:
        return self._before_s + (time.monotonic() - self._began if self._began else 0.0)

    @property
    def _control_s(self) -> float:
        """CPU seconds of this process for the run; what people look at does not count."""
        return time.process_time() - self._cpu_began - self._shown_s

    @property
    def control_share(self) -> float:
        """Of one core, in this attempt of the run."""
        return self._control_s / max(1e-9, time.monotonic() - self._began) if self._began else 0.0

    async def _train(self) -> None:
        if self.server.ledger.version >= self.config.steps or self.interrupted:
            return
        self.training = True
        self._saving.begin(self._loop.time())
        self._steps.busy_s = self.record.instance_busy_s
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        for name, port in self.instances.items():
            if self.crew.children[name].ready.is_set():
                self.control.join(port)
        if self._checkpoint is not None:
            self.control.recover()
        self._trainer.reset()  # its clock begins now
        cpu = {name: child.cpu_s for name, child in self.crew.children.items()}
        try:
            await self.crew.within(self.control.run(self.config.steps), "training")
        finally:
            self.training = False
            self.record.seconds = self.seconds
            self.record.control_s += self._control_s
            self.record.instance_s += len(self.instances) * (time.monotonic() - self._began)
            for port in self.instances.values():
                self.record.instance_busy_s += port.busy_s
            for name, child in self.crew.children.items():
                used = child.cpu_s - (cpu[name] if self.crew.incarnations[name] == 1 else 0.0)
                self.record.cpu_s[name] = self.record.cpu_s.get(name, 0.0) + used

    def _interrupt(self, number: signal.Signals) -> None:
        """End in good order. The second Ctrl-C is Python's own; the other signals may come again."""
        self._loop.remove_signal_handler(signal.SIGINT)
        if self.interrupted:
            return
        self.interrupted = True
        self.stopped_by = "Ctrl-C" if number == signal.SIGINT else number.name
        if not self._started:
            self.crew.fail(Interrupted(f"stopped by {self.stopped_by} before the first step"))
        elif self.training:
            self.control.stop()
        self._evaluations.wait_no_more()

    def _committed(self, step: int, groups: list[Group]) -> None:
        version = step + 1
        self.record.committed(version, self.seconds)
        if self._report is not None and self._report.step == step:
            self._log_step(self._report, groups)
        let_go(groups)
        self.show(self)
        every = self.config.evaluation.every
        if every and version % every == 0 and version < self.config.steps:
            self._evaluations.ask(version, now=self.config.evaluation.when == "during")
        now = self._loop.time()
        if version < self.config.steps and not self._rescuing and self._saving.due(version, now):
            self._saving.periodic(version, now)

    def _aborted(self, trajectory: Trajectory, _reason: str) -> None:
        self.record.tokens_wasted += trajectory.generated

    def _log_step(self, report: Trained, groups: list[Group]) -> None:
        """A step is committed: what its trainer said of it goes into the record, and to the log."""
        self.record.trained(
            report.facts, report.token_staleness, report.trajectory_staleness, report.busy_s, report.idle_s
        )
        busy_s = self.record.instance_busy_s + sum(port.busy_s for port in self.instances.values())
        self._steps.add(report, groups, self.record.seconds, busy_s)
        self._look_at_disk()

    async def _show_for_ever(self) -> None:
        while True:
            began = time.process_time()
            self.show(self)
            self._shown_s += time.process_time() - began
            await asyncio.sleep(VIEW_S)

    # Evaluation and checkpoints

    async def _evaluate(self) -> None:
        """Of the version that is there now; whatever the evaluator was asked before is answered first."""
        version = self.server.ledger.version
        if not self.interrupted and not any(each[0] == version for each in self.record.accuracy):
            self._evaluations.ask(version)
            await self.crew.within(self._evaluations.settled(version), "evaluation")

    def _send_evaluate(self, now: bool) -> None:
        child = self.crew.children["evaluator"]
        if child.ready.is_set():  # the one that takes its place is asked when it is
            self.watchdog.asked("evaluator", "evaluate", "evaluation", self._loop.time())
            child.send(Evaluate(now))

    def _evaluation_missing(self, version: int, why: str) -> None:
        self._failed("evaluation", "missing", f"the evaluation of version {version} is missing: {why}")

    async def _save_last(self) -> None:
        """The last checkpoint. On a full disk it is waited for, for a while only if somebody wants the run to end."""
        began = self._loop.time()
        while why := await self._saved():
            self.incidents.rarely("last", "the last checkpoint is tried again and again: make room", self._loop.time())
            if self.interrupted and self._loop.time() - began > STOPPED_S:
                raise RunError(f"the last checkpoint could not be written: {why}")
            await self.crew.within(asyncio.sleep(RETRY_S), "pause")

    async def _saved(self) -> str:
        asked = self._saving.ask(self.server.ledger.version)
        await self.crew.within(asked.wait(), "last checkpoint")
        return asked.why

    async def _close(self) -> None:
        self.outbox.close()
        await self._pool.close()
        os.close(self._log)
        await self.crew.stop()
        self.journal.on_durable = lambda: None
        with suppress(JournalError):  # on a full disk: a checkpoint is what a run continues from
            await asyncio.to_thread(self.journal.close)
        self._steps.close()
        self._decisions.flush()


def _add(error: Exception, what: str) -> None:
    """To its message, or below its traceback if it is a mistake of ours."""
    if isinstance(error, StaleFlowError):
        error.args = (f"{error}; {what}",)
    else:
        error.add_note(what)
