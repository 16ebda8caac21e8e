"""A run on this machine: the control plane in this process, every other role in one of its own.

    run = LocalRun(config, directory, model_folder, task)
    summary = asyncio.run(run.execute())

Instances and reward workers that die are replaced and lose nobody's work; the trainer's death ends the run with a line
that says how to resume it. Ctrl-C ends it in good order, with a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from staleflow.config import Config
from staleflow.coordinator.cost import CostModel
from staleflow.observe.metrics import MetricsLog
from staleflow.protocol import StalenessLedger
from staleflow.reward.pool import PoolPort, RewardPool
from staleflow.reward.pool import Settings as RewardSettings
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.filters import no_signal
from staleflow.runtime.local.directory import RunDirectory
from staleflow.runtime.local.messages import Broken, Evaluate, Evaluated, News, Pushed, Ready, Saved, Setup, Trained
from staleflow.runtime.local.placement import placement
from staleflow.runtime.local.process import Child
from staleflow.runtime.local.record import Record
from staleflow.runtime.local.remote import RemoteInstance, RemoteTrainer
from staleflow.runtime.local.saved import STATE, pack_state, unpack_state
from staleflow.runtime.outbox import HeldTrainer, Outbox
from staleflow.servers.book import let_go
from staleflow.servers.durable import DurableJournal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.tasks.opening import TaskSet

START_S = 300.0
SAVE_S = 300.0
STALL_S = 1800.0
CYCLE_S = 0.05
"""Decisions are made at most this often: steps of a laptop run take a fraction of a second."""
MOST_LIVES = 5
"""An instance that dies so often will die again."""
VIEW_S = 0.25
LAZY_S = 0.1
"""Only the trainer waits for the journal: instances and reward workers end with this process, so whatever they have
heard that was not durable is forgotten on both sides."""


class RunError(RuntimeError):
    """The run cannot go on; one line that says why and what to do."""


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
    ) -> None:
        self.config = config
        self.directory = directory
        self.task = task
        self.show = show
        """Called a few times a second, for people."""
        self.record = Record(config.staleness)
        self.latest: dict[str, float] = {}
        """The facts of the latest step."""
        self.instances: dict[str, RemoteInstance] = {}
        self.interrupted = False
        self._model = model
        self._cost = cost
        self._checkpoint = checkpoint
        self._children: dict[str, Child] = {}
        self._lives: dict[str, int] = {}
        self._failure: asyncio.Future[None] | None = None
        self._metrics = MetricsLog(directory.metrics)
        self._lengths: dict[int, tuple[list[int], int]] = {}
        self._began = 0.0
        self._before_s = 0.0
        """Seconds of training in earlier lives of the run."""
        self._training = False
        self._saved: dict[str, asyncio.Event] = {}
        self._evaluated = asyncio.Event()
        self._shown_s = 0.0
        self._cpu_began = 0.0
        self._restarts: set[asyncio.Task[None]] = set()
        self._closing = False
        self.notes: tuple[str, ...] = ()

    async def execute(self) -> dict[str, Any]:
        """The whole run. Returns its summary, which is in the directory too."""
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._open()
        try:
            await self._named(self._start(), "start of all processes", START_S)
            await self._evaluate()
            await self._train()
            await self._end()
        finally:
            await self._close()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        return self.record.summary(self.server.ledger.counts())

    # Setting up

    def _open(self) -> None:
        config = self.config
        life = self.directory.lives + 1
        self.journal = DurableJournal(self.directory.journal(life), lazy_s=LAZY_S)
        limits = Limits(config.rollout.max_tokens, self.task.max_prompt_tokens, self.task.vocab_size)
        ledger = StalenessLedger(config.groups, config.staleness, config.redundancy)
        self.server = TrajectoryServer(
            ledger, config.group_size, config.extra_members, self.journal, Payloads(limits)
        )
        if self._checkpoint is not None:
            self.record = unpack_state((self._checkpoint / STATE).read_bytes(), self.server, self.journal)
            self.record.lives = life
            self._before_s = self.record.seconds
        self.server.on_committed = self._committed
        self.server.on_aborted = self._aborted
        self.outbox = Outbox(self.journal)
        self.journal.on_durable = lambda: self._loop.call_soon_threadsafe(self.outbox.release)
        self._life = life

    async def _start(self) -> None:
        config = self.config
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        self._places = placement(cores, config.rollout.instances, config.processes.threads, config.processes.pin)
        trainer = self._child("trainer", "trainer")
        self._trainer = RemoteTrainer(trainer, self.server, self.server.ledger.version)
        self._pool = RewardPool(
            config.reward.function,
            RewardSettings(config.reward.workers, config.reward.timeout_s),
            self._on_scored,
            self._on_score_failed,
            stderr=self._reward_log(),
        )
        self.control = self._control()
        await trainer.start(self._guarded(self._from_trainer), lambda: self._trainer_ended(trainer))
        for at in range(config.rollout.instances):
            await self._start_instance(f"i{at}")
        evaluator = self._child("evaluator", "evaluator")
        await evaluator.start(self._guarded(self._from_evaluator), lambda: self._evaluator_ended(evaluator))
        await self._pool.start()
        await asyncio.gather(*(child.ready.wait() for child in self._children.values()))

    def _reward_log(self) -> int:
        self._log = os.open(self.directory.log("reward"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self._log

    def _control(self) -> ControlPlane:
        config = self.config
        rewards = PoolPort(self._pool, self.task.prompts.problem, self._tokens, self.task.decode)
        settings = Settings(
            config.strategies,
            self._cost,
            cycle_s=CYCLE_S,
            stall_s=STALL_S,
            reward_timeout_s=2 * config.reward.timeout_s + 60,
            reward_tries=config.reward.tries,
            pull_s=0.1,
        )
        control = ControlPlane(
            settings,
            self.server,
            HeldTrainer(self._trainer, self.outbox),
            rewards,
            self.task.prompts,
            term=self._life,
        )
        if config.filter == "no-signal":
            control.filter = no_signal
        return control

    def _tokens(self, name: str) -> Any:
        assert self.server.payloads is not None
        return self.server.payloads.tokens(name)

    def _child(self, role: Any, name: str) -> Child:
        place = self._places[name]
        checkpoint = str(self._checkpoint) if role == "trainer" and self._checkpoint else ""
        setup = Setup(
            role,
            name,
            str(self.directory.path),
            str(self._model),
            "weights",
            list(place.cores),
            place.threads,
            place.nice,
            checkpoint,
        )
        child = self._children[name] = Child(setup, self.directory.log(name))
        return child

    # Processes: what they say, and what happens when they end

    async def _start_instance(self, name: str) -> None:
        life = self._lives[name] = self._lives.get(name, 0) + 1
        child = self._child("instance", name)
        assert self.server.payloads is not None
        port = self.instances[name] = RemoteInstance(child, life, self.server.payloads)

        def hear(message: Any) -> None:
            if isinstance(message, News):
                report = port.hear(message)
                if not child.ready.is_set():
                    child.ready.set()
                    if self._training:
                        self._join(port)
                elif self._training:
                    self.control.on_report(report)
            elif isinstance(message, Broken):
                self._fail(f"instance {name}: {message.why}")

        await child.start(self._guarded(hear), lambda: self._instance_ended(child))

    def _join(self, port: RemoteInstance) -> None:
        self.control.join(port)

    def _instance_ended(self, child: Child) -> None:
        if self._closing:
            return
        self.record.instance_busy_s += self.instances[child.name].load.busy_s
        if self._training:
            self.control.left(child.name)
        if self._lives[child.name] >= MOST_LIVES:
            self._fail(f"instance {child.name} died {MOST_LIVES} times, last: {child.last_words()} (see {child.log})")
        else:
            task = self._loop.create_task(self._start_instance(child.name), name=f"restart of {child.name}")
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    def _from_trainer(self, message: Any) -> None:
        match message:
            case Ready(version=version):
                self._trainer.version = version
                self._children["trainer"].ready.set()
            case Pushed(version=version):
                self._trainer.version = version
                self.control.on_pushed(version)
            case Trained():
                self._trained(message)
            case Saved(folder=folder):
                self._saved.setdefault(folder, asyncio.Event()).set()
                self._prune()
            case Broken(why=why):
                self._fail(why)

    def _trainer_ended(self, child: Child) -> None:
        if not self._closing:
            self._fail(
                f"the trainer died: {child.last_words()} (see {child.log}); "
                f"go on with: staleflow train --resume {self.directory.path}"
            )

    def _from_evaluator(self, message: Any) -> None:
        match message:
            case Ready():
                self._children["evaluator"].ready.set()
            case Evaluated(version=version, accuracy=accuracy):
                self.record.evaluated(version, accuracy)
                self._evaluated.set()
                goal = self.config.stop_at
                if goal is not None and accuracy >= goal and self._training:
                    self.control.stop()
            case Broken(why=why):
                self._fail(f"evaluation: {why}")

    def _evaluator_ended(self, child: Child) -> None:
        if not self._closing:
            self._fail(f"the evaluator died: {child.last_words()} (see {child.log})")

    def _guarded(self, hear: Callable[[Any], None]) -> Callable[[Any], None]:
        """A mistake of ours in hearing a message ends the run with its own traceback."""

        def guarded(message: Any) -> None:
            try:
                hear(message)
            except Exception as error:
                self._fail(error)

        return guarded

    def _fail(self, why: str | Exception) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(RunError(why) if isinstance(why, str) else why)

    async def _named(self, work: Any, name: str, timeout_s: float | None = None) -> None:
        """Wait for something, but not longer than it may take, and not if anything has failed meanwhile."""
        assert self._failure is not None
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task, self._failure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._failure in done:
                self._failure.result()
            raise RunError(f"the {name} took more than {timeout_s:g} s: see {self.directory.logs}")
        task.result()

    # Training

    @property
    def seconds(self) -> float:
        return self._before_s + (time.monotonic() - self._began if self._began else 0.0)

    @property
    def _control_s(self) -> float:
        """CPU seconds of this process for the run; what people look at does not count."""
        return time.process_time() - self._cpu_began - self._shown_s

    @property
    def control_share(self) -> float:
        """Of one core, in this life of the run."""
        return self._control_s / max(1e-9, time.monotonic() - self._began) if self._began else 0.0

    async def _train(self) -> None:
        if self.server.ledger.version >= self.config.steps:
            return
        self._training = True
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        for name, port in self.instances.items():
            if self._children[name].ready.is_set():
                self._join(port)
        if self._checkpoint is not None:
            self.control.recover()
        self._trainer.reset()  # its clock begins now
        for each in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(each, self._interrupt)
        view = self._loop.create_task(self._show_for_ever(), name="view")
        try:
            await self._named(self.control.run(self.config.steps), "training")
        finally:
            view.cancel()
            for each in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(each)
            self._training = False
            self.record.seconds = self.seconds
            self.record.control_s += self._control_s
            self.record.instance_s += len(self.instances) * (time.monotonic() - self._began)
            for port in self.instances.values():
                self.record.instance_busy_s += port.load.busy_s

    def _interrupt(self) -> None:
        """Ctrl-C: end in good order. The second one is Python's own."""
        self.interrupted = True
        for each in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(each)
        self.control.stop()

    def _on_scored(self, name: str, reward: float) -> None:
        self.control.on_scored(name, reward)

    def _on_score_failed(self, name: str, why: str) -> None:
        self.control.on_score_failed(name, why)

    def _committed(self, step: int, groups: list[Group]) -> None:
        version = step + 1
        self.record.committed(version, self.seconds)
        members = [member for group in groups for member in group.members if member.state == "consumed"]
        prompts = sum(member.group.prompt_tokens for member in members)
        self._lengths[step] = ([member.generated for member in members], prompts)
        let_go(groups)
        every = self.config.evaluation.every
        if every and version % every == 0 and version < self.config.steps:
            self._children["evaluator"].send(Evaluate())
        every = self.config.checkpoints.every
        if every and version % every == 0 and version < self.config.steps:
            self._save(version)

    def _aborted(self, trajectory: Trajectory, _reason: str) -> None:
        self.record.tokens_wasted += trajectory.generated

    def _trained(self, message: Trained) -> None:
        self.latest = message.facts
        self.record.trained(
            message.facts, message.token_staleness, message.trajectory_staleness, message.busy_s, message.idle_s
        )
        self.show(self)
        lengths, prompts = self._lengths.pop(message.step, ([], 0))
        self._metrics.write(
            {
                "step": message.step,
                "time": self.record.made_at.get(message.step + 1),
                **message.facts,
                "token_staleness": message.token_staleness,
                "trajectory_staleness": message.trajectory_staleness,
                "train_s": message.busy_s,
                "idle_s": message.idle_s,
                "prompt_tokens": prompts,
                "lengths": lengths,
            }
        )

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
        while not any(each[0] == version for each in self.record.accuracy):
            self._evaluated.clear()
            self._children["evaluator"].send(Evaluate())
            await self._named(self._evaluated.wait(), "evaluation", START_S)

    def _save(self, version: int) -> Path:
        """The trainer gets this before any word of the next step's end, so it is at this version then."""
        folder = self.directory.checkpoint(version)
        state = pack_state(self.server, self.record)
        self.outbox.send(self._trainer.save, folder, {STATE: state})
        return folder

    def _prune(self) -> None:
        keep = self.config.checkpoints.keep
        whole = sorted(each for each in self.directory.checkpoints.glob("step-*") if (each / STATE).is_file())
        for folder in whole[: -keep or len(whole)] if keep else []:
            _remove(folder)

    async def _end(self) -> None:
        """The last checkpoint, and how good it is."""
        version = self.server.ledger.version
        folder = self._save(version)
        done = self._saved.setdefault(str(folder), asyncio.Event())
        await self._named(done.wait(), "last checkpoint", SAVE_S)
        if not self.interrupted:
            await self._evaluate()

    async def _close(self) -> None:
        self._closing = True
        for task in list(self._restarts):
            task.cancel()
        self.outbox.close()
        with suppress(AttributeError):  # it failed before the pool was made
            await self._pool.close()
            os.close(self._log)
        await asyncio.gather(*(child.stop() for child in self._children.values()))
        self.journal.on_durable = lambda: None
        await asyncio.to_thread(self.journal.close)
        self._metrics.close()


def _remove(folder: Path) -> None:
    """Renamed first, so that a checkpoint that is half deleted has no name that anyone would resume from."""
    import shutil

    gone = folder.with_name(f".removed-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
