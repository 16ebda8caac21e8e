"""A run on this machine: the control plane in this process, every other role in one of its own.

    run = LocalRun(config, directory, model_folder, task, cost)
    summary = run_patiently(run.execute())

Processes that die or stand still are replaced, and nobody's work is lost: trajectories continue elsewhere, and a new
trainer takes over the last version with everything that belongs to it. Whatever else ends a run (Ctrl-C, SIGTERM,
SIGHUP, a failure that it cannot survive) leaves a checkpoint, or the message says that none could be made.

If this process dies, the others wait for another: a ``LocalRun`` on the same directory takes over *in place*. It has
the state from the journal, adopts the processes, hears what nobody heard, and continues.

What processes say is in ``hearing``, what goes wrong in ``watching``, the last checkpoint in ``rescuing``, what a new
trainer lacks in ``remaking``, which versions are evaluated in ``evaluating``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from staleflow.config import Config
from staleflow.config.resuming import outdated
from staleflow.coordinator.cost import CostModel
from staleflow.errors import StaleFlowError
from staleflow.reward.pool import PoolPort, RewardPool
from staleflow.run.costs import RunCosts
from staleflow.run.decisions import DecisionLog
from staleflow.run.directory import RunDirectory
from staleflow.run.incidents import Incidents
from staleflow.run.journalled import JournalledRecord
from staleflow.run.opening import KEPT_BYTES, Opened, open_state
from staleflow.run.origin import ORIGIN, origin_of, write_origin
from staleflow.run.processes import Process
from staleflow.run.record import Record, sizes
from staleflow.run.samples import Samples
from staleflow.run.signals import Signals
from staleflow.run.state import STATE, pack_state
from staleflow.run.step_log import StepLog
from staleflow.run.tracked import trackers_of
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.local.crew import Crew, RunError
from staleflow.runtime.local.evaluating import Evaluating
from staleflow.runtime.local.hearing import Hearing
from staleflow.runtime.local.patience import expect
from staleflow.runtime.local.playing import Playing
from staleflow.runtime.local.remaking import Remaking
from staleflow.runtime.local.remote import RemoteInstance, RemoteTrainer
from staleflow.runtime.local.rescuing import Interrupted, Rescue
from staleflow.runtime.local.saving import Saving
from staleflow.runtime.local.scaling import Scaling, unused
from staleflow.runtime.local.site import LocalSite
from staleflow.runtime.local.supervisor import Supervisor, requests
from staleflow.runtime.local.time_spent import TimeSpent
from staleflow.runtime.local.watching import STALL_S, Watching
from staleflow.runtime.outbox import HeldTrainer, Outbox
from staleflow.runtime.watchdog import Watchdog
from staleflow.servers.book import let_go
from staleflow.servers.database import JournalError
from staleflow.servers.filters import FILTERS, check_reason
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.tasks.opening import TaskSet, decoder_of, was_cut
from staleflow.workers.rollout import TICK_S

__all__ = ["LocalRun", "RunError"]

START_S = 300.0
ADOPTED_S = 10.0
"""An instance of an earlier control plane that has not answered after this time is replaced."""
CYCLE_S = TICK_S
"""Between two decisions: the event loop is woken up this often (``patience``), and all that has come is decided on."""


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
        supervisor: Supervisor | None = None,
        site: LocalSite | None = None,
    ) -> None:
        """``cost`` is a first guess of what a decoding step takes; ``show`` is called a few times a second; ``tell``
        gets a line for everything that goes wrong; ``supervisor``: of this process; ``site``: where the others are, by
        default on this machine."""
        self.config = config
        self.directory = directory
        self.site = site or LocalSite(directory, config)
        self.task = task
        self.show = show
        self.kept = JournalledRecord(Record(config.staleness), lambda *_: None)
        self.instances: dict[str, RemoteInstance] = {}
        self.interrupted = False
        self.stopped_by = ""
        """The signal."""
        self.stopped_early = ""
        """Why an evaluation ended the run."""
        self.incidents = Incidents(tell)
        self.watchdog = Watchdog(lost_s=config.processes.hung_s)
        self.model = model
        self._cost = cost
        self._checkpoint = checkpoint
        self._origin = origin_of(config, task.fingerprint, model)
        self.steps = StepLog(directory.metrics)
        self._decisions = DecisionLog(directory.decisions, on_trouble=self.incidents.note)
        self.training = False
        self.started = False
        """Whether every process is ready."""
        self.doing = ""
        """What it does when it has started and does not train."""
        self.in_place = False
        """Whether this continues with processes of a control plane that died."""
        self._supervisor = supervisor
        self.hearing = Hearing(self)
        self.watching = Watching(self)
        self.time = TimeSpent(self)
        self.rescue = Rescue(self)
        self.remaking = Remaking(self)
        self.scaling = Scaling(self)
        self.costs = RunCosts()
        self.signals = Signals(config)

    async def execute(self) -> dict[str, Any]:
        """The whole run. Returns its summary."""
        self.loop = asyncio.get_running_loop()
        try:
            self.site.open()
            return await self._executed()
        finally:
            await self.site.close()

    async def _executed(self) -> dict[str, Any]:
        with self.site.claims():  # before a trainer ends that holds what the next one continues with
            self._open(self._opened())
            requested = requests()
            for each in requested:
                self.loop.add_signal_handler(each, self._signalled, each)
            beside = [
                self.beside(self.watching.keep_showing(), "view"),
                self.beside(self.watching.keep_watching(), "watch"),
            ]
            if self._supervisor is not None:
                self._supervisor.tell(self.directory.path, stored=True)
                self._supervisor.attend(self._interrupt, self.crew.reaped)
            try:
                await self._run()
            except Exception as error:
                if self.time.began:
                    _add(error, await self.rescue.rescued())
                raise
            finally:
                for task in beside:
                    task.cancel()
                self.scaling.close()
                await self._close()
                for each in requested:
                    self.loop.remove_signal_handler(each)
                if self._supervisor is not None:
                    self._supervisor.leave()
        self._write_profile()
        return self.summary()

    async def _run(self) -> None:
        if self.in_place:
            self.crew.optional.add("evaluator")
        limit_s = None if self.in_place else START_S  # a trainer at work comes when it has finished
        await self.crew.within(self._start(), "start of all processes", limit_s)
        self.started = True
        self.crew.optional.add("evaluator")
        await self.remaking.all()
        if not self.in_place or not self.server.ledger.version:
            await self.evaluating.present()
        else:
            self.evaluating.if_due(self.server.ledger.version)  # the evaluator may have died with who asked it
        await self._train()
        self.now("saves the last checkpoint")
        await self.rescue.save_last()
        await self.evaluating.present()

    def now(self, doing: str) -> None:
        """What it does now, shown at once."""
        self.doing = doing
        self.show(self)

    def beside(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Something that runs as long as the run does; if it cannot, that is a bug, and ends it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.crew.fail(error if isinstance(error, Exception) else str(error))

        task = self.loop.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    def summary(self) -> dict[str, Any]:
        best = self.record.best(figure := self.config.evaluation.figure)
        found = None if best is None else {"step": best[0], "figure": figure, "value": best[1]}
        ended = {"best": found, "stopped_early": self.stopped_early}
        return self.record.summary(self.server.ledger.counts()) | ended | self._for_the_simulator()

    def _for_the_simulator(self) -> dict[str, Any]:
        """How large the run was and what things took: what ``staleflow.study.measured`` reads."""
        believed = {"believed": asdict(self._cost)}
        return sizes(self.config) | {"cycle_s": CYCLE_S} | self.costs.means() | believed

    def _write_profile(self) -> None:
        """What the engines' steps took here, unless there were too few to tell."""
        rollout = self.config.rollout
        if (found := self.costs.profile(by_cpu=rollout.device == "cpu")) is not None:
            about = {"model": self.config.model, "device": rollout.device, "dtype": rollout.dtype}
            about |= {"date": time.strftime("%Y-%m-%d")}
            with suppress(OSError):
                self.directory.write(self.directory.profile, about | found)

    # Setting up

    def _opened(self) -> Opened:
        """Where the run is. Processes of an attempt before this one stay if it continues with what they hold."""
        found = self.site.left()
        left = self._up_to_date(found)
        trainer_there = any(each.name == "trainer" for each in left)
        opened = open_state(self.config, self.directory, self.task, self._checkpoint, trainer_there)
        self.in_place = bool(left) and opened.standby
        if not self.in_place:
            self.site.end(left)
        if not opened.standby:
            self.site.discard()
        deaths = self._supervisor.deaths if self._supervisor is not None else ()
        for how in deaths or (["not known how"] if found else []):
            opened.kept.counted("restarts", "control", how)
            self.incidents.note(f"the control plane died: {how}")
        if opened.how:
            opened.journal.commit()
            self.incidents.note(opened.how)
        else:
            write_origin(self.directory, self._origin)
        return opened

    def _up_to_date(self, found: list[Process]) -> list[Process]:
        """Those that do what the configuration says. The others end before it is written: a control plane after this
        one could not tell them from the rest."""
        _, before = RunDirectory.existing(self.directory.path)
        changed = outdated(before, self.config)
        self.site.end(each for each in found if each.role in changed)
        self.directory.write_config(self.config)
        return [each for each in found if each.role not in changed]

    def _open(self, opened: Opened) -> None:
        config = self.config
        self.server, self.payloads, self.journal = opened.server, opened.payloads, opened.journal
        self.kept, self._attempt, self._resumed = opened.kept, opened.attempt, bool(opened.how)
        self.server.least_epoch = self._attempt - 1 << 20
        self.time.before_s = self.record.seconds
        if (row := self.steps.rewind(self.server.ledger.version)) is not None and opened.standby:
            self.kept.recall(row)
        self.crew = self._crew(opened.standby)
        self.trackers = trackers_of(config, self.directory, self.server.ledger.version, self._noted_elsewhere)
        self.server.on_committing = self._committing
        self.server.on_committed = self._committed
        self.server.on_aborted = self._aborted
        self.outbox = Outbox(self.journal)
        self.journal.on_durable = self.outbox.waker(self.loop)
        self.trainer = RemoteTrainer(self.crew, self.server, asked=self.hearing.trainer_asked)
        self.saving = Saving(
            self.directory,
            config.checkpoints,
            lambda: {STATE: pack_state(self.server, self.record), ORIGIN: self._origin},
            lambda folder, also: self.outbox.send(self._save, folder, also),
            lambda why, line: self.failed("checkpoint", why, line),
        )
        self.evaluating = Evaluating(self)
        self._log = os.open(self.directory.log("reward"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.playing = Playing(self) if config.environment.play else None
        self.pool = RewardPool(
            config.reward,
            self.crew.fatal(self.hearing.reward),
            self.crew.fatal(self.hearing.reward_failed),
            stderr=self._log,
            decoder=decoder_of(config.data, self.model),
            on_away=self.hearing.reward_away,
            on_lost=self.hearing.reward_worker_lost,
            heard_s=CYCLE_S,
            expect=expect,
        )
        self.control = self._control()

    def _crew(self, standby: bool) -> Crew:
        places, died = self.site.places(unused(self.config.rollout.instances)), self.watching.death
        parts = self.site, self.model, places, self.watchdog, died, self._checkpoint
        return Crew(*parts, self._attempt, standby)

    def _control(self) -> ControlPlane:
        config = self.config
        cut = was_cut(self.task, config.rollout.stop_strings)
        port = PoolPort(self.pool, self.task.prompts.problem, self.payloads.bytes_of, cut)
        names, version = config.reward.names, self.server.ledger.version
        self.samples = Samples(
            self.directory.samples, self.task, config.samples, names, cut, self.incidents.note, version
        )
        settings = Settings(
            config.strategies,
            self._cost,
            cycle_s=0.0,  # the event loop is patient
            stall_s=STALL_S,
            reward_timeout_s=2 * config.reward.timeout_s + 60 + config.reward.patience_s,
            reward_tries=config.reward.tries,
            pull_s=0.1,
        )
        environments = None if self.playing is None else self.playing.environments
        trainer = HeldTrainer(self.trainer, self.outbox, self.costs.finish.add)
        control = ControlPlane(settings, self.server, trainer, port, self.task.prompts, self._attempt, environments)
        control.scoring.on_answer = self.costs.reward.add
        control.reports.on_bad = self.hearing.bad_report
        control.on_decision = lambda _now, decision: self._decisions.write(self.time.seconds, decision)
        control.on_drained = self.scaling.drained
        judge = FILTERS.bound(config.filter, {}, config.filter_arguments)
        judge = FILTERS.held(config.filter, judge, check_reason)
        control.filter = self.signals.counted(judge, self.incidents.note)
        return control

    async def _start(self) -> None:
        await self.crew.listen()
        self.crew.returns_within(self.record.trainer_busy_s / max(1, self.record.version))
        self.start_trainer()
        for name in self.scaling.begin(self.crew.orphans):
            self.start_instance(name)
        self.crew.start("evaluator", "evaluator", self.hearing.evaluator, lambda _: self.evaluating.asked.died())
        self.crew.all_started()
        self.loop.call_later(ADOPTED_S, self.crew.give_up_adopted)
        await (self.pool if self.playing is None else self.playing).start()
        await self.crew.all_ready()

    def start_instance(self, name: str) -> None:
        self.crew.start("instance", name, self.hearing.instance, self.hearing.instance_ended)

    def start_trainer(self) -> None:
        self.crew.start("trainer", "trainer", self.hearing.trainer, lambda _: None)

    # Training

    def join(self, port: RemoteInstance) -> None:
        """From now on it gets work."""
        port.joined = True
        self.control.join(port)

    @property
    def ending(self) -> bool:
        """Whether the last step is made, or the run has been stopped or has failed."""
        return self.control.over or self.interrupted or self.rescue.begun

    @property
    def loss(self) -> float | None:
        """Of the latest step."""
        return self.kept.report.facts.get("loss") if self.kept.report is not None else None

    @property
    def record(self) -> Record:
        return self.kept.record

    async def _train(self) -> None:
        if self.server.ledger.version >= self.config.steps or (self.interrupted and not self.in_place):
            return
        self.training = True
        self.saving.begin(self.loop.time())
        self.steps.busy_s = self.record.instance_busy_s
        self.time.begin()
        for name, port in self.instances.items():
            if self.crew.children[name].ready.is_set():
                self.join(port)
        self.trainer.reset()  # its clock begins now, and what it is fed from now on counts
        steps = self.server.ledger.frontier if self.interrupted else self.config.steps
        if self._resumed:
            self.control.recover(steps, self.hearing.early)
        for name in self.crew.leaving:
            self.control.drain(name)
        gc.freeze()  # nothing moves while all that was imported is looked through for garbage, a quarter of a second
        try:
            await self.crew.within(self.control.run(steps), "training")
        finally:
            gc.unfreeze()
            self.time.end()
            self.training = False
            self.kept.tell()

    def _save(self, folder: Path, also: dict[str, bytes]) -> None:
        """A trainer that is not there yet is asked again when it is."""
        if not self.remaking.brings_back:
            self.trainer.save(folder, also)

    def _signalled(self, number: signal.Signals) -> None:
        """The second Ctrl-C is Python's own; the other signals may come again."""
        if number == signal.SIGINT:
            self.loop.remove_signal_handler(number)
        self._interrupt(number)

    def _interrupt(self, number: signal.Signals) -> None:
        """End in good order."""
        if self.interrupted:
            return
        self.interrupted = True
        self.stopped_by = "Ctrl-C" if number == signal.SIGINT else number.name
        if not self.started and not self.in_place:
            self.crew.fail(Interrupted(f"stopped by {self.stopped_by} before the first step"))
        elif self.training:
            self.control.stop()
        self.evaluating.asked.wait_no_more()

    def _committing(self, step: int, groups: list[Group]) -> None:
        if (report := self.kept.report_of(step)) is None:
            return
        facts = self.samples.committed(step, groups)
        row = self.steps.add(report, groups, self.kept.reported_at, self.time.instance_busy_s, facts)
        self.trackers.log(step, row | {"tokens_wasted": self.record.tokens_wasted})
        self.signals.add(facts.get("cut"), report.facts.get("groups_without_signal", 0) / max(1, len(groups)))
        for warning in self.signals.warnings():
            self.incidents.note(warning)
        self.watching.disk()

    def _committed(self, step: int, groups: list[Group]) -> None:
        version = step + 1
        self.kept.committed(step, self.time.seconds)
        let_go(groups)
        self.show(self)
        self.evaluating.if_due(version)
        now = self.loop.time()
        kept = self.server.made_bytes
        if version < self.config.steps and not self.rescue.begun and self.saving.due(version, now, kept > KEPT_BYTES):
            self.saving.periodic(version, now)
        if kept > 2 * KEPT_BYTES:
            self.server.forget(version)

    def _aborted(self, trajectory: Trajectory, reason: str) -> None:
        self.kept.aborted(trajectory, reason)
        self.samples.forget(trajectory.name)

    def failed(self, what: str, why: str, line: str) -> None:
        self.kept.counted("failures", what, why)
        self.incidents.note(line)

    def _noted_elsewhere(self, line: str) -> None:
        """By another thread."""
        with suppress(RuntimeError):  # the run has ended
            self.loop.call_soon_threadsafe(self.incidents.note, line)

    async def _close(self) -> None:
        self.outbox.close()
        await self.pool.close()
        if self.playing is not None:
            await self.playing.close()
        os.close(self._log)
        await self.crew.stop()
        self.site.discard()
        self.journal.on_durable = lambda: None
        with suppress(JournalError):  # on a full disk: a checkpoint is what a run continues from
            await asyncio.to_thread(self.journal.close)
        self.steps.close()
        self._decisions.flush()
        await asyncio.to_thread(self.trackers.close)


def _add(error: Exception, what: str) -> None:
    """To its message, or below its traceback if it is a bug."""
    if isinstance(error, StaleFlowError):
        error.args = (f"{error}; {what}",)
    else:
        error.add_note(what)
