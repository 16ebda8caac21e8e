"""A run on this machine: the control plane in this process, every other role in one of its own.

    run = LocalRun(config, directory, model_folder, task, cost)
    summary = asyncio.run(run.execute())

Instances, trainer and reward workers that die are replaced, and nobody's work is lost: trajectories go on elsewhere,
and a new trainer takes over the last version with everything that belongs to it. Ctrl-C ends the run in good order,
with a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.config import Config
from staleflow.config.machine import free_memory
from staleflow.config.memory import trajectory_bytes
from staleflow.coordinator.cost import CostModel
from staleflow.observe.metrics import MetricsLog
from staleflow.protocol import StalenessLedger
from staleflow.reward.pool import PoolPort, RewardPool
from staleflow.run.checkpoints import checkpoints
from staleflow.run.costs import RunCosts
from staleflow.run.decisions import DecisionLog
from staleflow.run.directory import RunDirectory
from staleflow.run.origin import ORIGIN, origin_of
from staleflow.run.parts import sizes
from staleflow.run.record import Record
from staleflow.run.state import STATE, pack_state, unpack_state
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.local.crew import Crew, RunError
from staleflow.runtime.local.placement import placement
from staleflow.runtime.local.process import Child
from staleflow.runtime.local.remote import RemoteInstance, RemoteTrainer
from staleflow.runtime.outbox import HeldTrainer, Outbox
from staleflow.servers.book import let_go
from staleflow.servers.durable import DurableJournal
from staleflow.servers.filters import FILTERS
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.servers.weights import claim, standby_of
from staleflow.tasks.opening import TaskSet
from staleflow.tasks.options import ADDER
from staleflow.training.checksums import REMOVED
from staleflow.types import Evaluate, Evaluated, Pushed, Ready, Report, Saved, Trained

__all__ = ["LocalRun", "RunError"]

START_S = 300.0
SAVE_S = 300.0
STALL_S = 1800.0
CYCLE_S = 0.05
"""Decisions are made at most this often: steps of a laptop run take a fraction of a second."""
MOST_FAILURES = 256
"""A reward that fails so often in a row is not unlucky but broken."""
VIEW_S = 0.25
LAZY_S = 0.25
"""Only the trainer waits for the journal: instances and reward workers end with this process, so whatever they have
heard that was not durable is forgotten on both sides."""


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
        """``cost`` is a first guess of what a decoding step takes; ``show`` is called a few times a second."""
        self.config = config
        self.directory = directory
        self.task = task
        self.show = show
        self.record = Record(config.staleness)
        self.instances: dict[str, RemoteInstance] = {}
        self.interrupted = False
        self.notes: tuple[str, ...] = ()
        """What went wrong lately and was put right."""
        self._model = model
        self._cost = cost
        self._checkpoint = checkpoint
        self._origin = origin_of(config, task.fingerprint, model)
        self._metrics = MetricsLog(directory.metrics)
        self._decisions = DecisionLog(directory.decisions, on_trouble=lambda why: setattr(self, "notes", (why,)))
        self._training = False
        self._began = self._cpu_began = 0.0
        self._before_s = 0.0
        """Seconds of training in earlier attempts of the run."""
        self._shown_s = 0.0
        """CPU seconds for what people look at."""
        self._report: Trained | None = None
        """What the trainer said of the latest step."""
        self._saving: dict[Path, tuple[int, bytes, asyncio.Event]] = {}
        """Checkpoints that the trainer was asked for: the version, our part of it, and whether it is there."""
        self._evaluated: set[int] = set()
        self._evaluation = asyncio.Event()
        self._failures = 0
        """Rewards that failed since the last one that did not."""
        self.costs = RunCosts()
        self._instances_busy_s = 0.0
        """When the last step was committed."""

    async def execute(self) -> dict[str, Any]:
        """The whole run. Returns its summary."""
        self._loop = asyncio.get_running_loop()
        config = self.config
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
        places = placement(cores, config.rollout.instances, config.processes.threads, config.processes.pin)
        self.crew = Crew(self.directory, self._model, places, self._checkpoint)
        store = self.directory.store
        with claim(store), claim(standby_of(store)):
            self._open()
            try:
                await self.crew.within(self._start(), "start of all processes", START_S)
                await self._evaluate()
                await self._train()
                await self._end()
            finally:
                await self._close()
        self._write_profile()
        return self.summary()

    def summary(self) -> dict[str, Any]:
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
        self._trainer = RemoteTrainer(self.crew, self.server, self.server.ledger.version)
        self._log = os.open(self.directory.log("reward"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pool = RewardPool(
            config.reward,
            self._on_scored,
            self._on_score_failed,
            stderr=self._log,
            decoder=decoder_of(config, self._model),
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
            reward_timeout_s=2 * config.reward.timeout_s + 60,
            reward_tries=config.reward.tries,
            pull_s=0.1,
        )
        trainer = HeldTrainer(self._trainer, self.outbox, self.costs.finish.add)
        control = ControlPlane(settings, self.server, trainer, port, self.task.prompts, term=self._attempt)
        control.scoring.on_answer = self.costs.reward.add
        control.on_decision = lambda _now, decision: self._decisions.write(self.seconds, decision)
        control.filter = FILTERS.bound(config.filter, {}, config.filter_arguments)
        return control

    async def _start(self) -> None:
        await self.crew.start("trainer", "trainer", self._from_trainer, self._trainer_ended)
        for at in range(self.config.rollout.instances):
            await self.crew.start("instance", f"i{at}", self._from_instance, self._instance_ended)
        await self.crew.start("evaluator", "evaluator", self._from_evaluator, lambda _: None)
        await self._pool.start()
        await self.crew.all_ready()

    # What the processes say

    def _from_instance(self, child: Child, message: Any) -> None:
        match message:
            case Ready():
                self.instances[child.name] = RemoteInstance(child, self.crew.incarnations[child.name])
            case Report():
                port = self.instances[child.name]
                port.hear(message)
                self.costs.hear(message.costs)
                if not child.ready.is_set():
                    child.ready.set()
                    if self._training:
                        self.control.join(port)
                elif self._training:
                    self.control.on_report(message)

    def _instance_ended(self, child: Child) -> None:
        self.notes = (f"{child.name} died and is replaced: {child.last_words()}",)
        if (port := self.instances.get(child.name)) is not None:
            self.record.instance_busy_s += port.busy_s
        if self._training:
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
                self.control.on_pushed(version)
            case Trained():
                self._report = message
            case Saved(folder=folder):
                if (asked := self._saving.pop(Path(folder), None)) is not None:
                    asked[2].set()
                self._prune()

    def _trainer_ended(self, child: Child) -> None:
        if not self.config.processes.standby:
            self.crew.died(child, "the trainer died, and processes.standby is off")

    def _trainer_back(self, version: int) -> None:
        """Another trainer has taken over. What was sent to the dead one was sent to nobody."""
        self.notes = (f"the trainer died and was replaced at version {version}",)
        if self._training:
            self.control.on_trainer_lost()
            self.control.on_trainer_back()
        for folder, (wanted, state, _) in self._saving.items():
            if wanted == version:
                self._trainer.save(folder, {STATE: state, ORIGIN: self._origin})

    def _from_evaluator(self, child: Child, message: Any) -> None:
        match message:
            case Ready():
                child.ready.set()
            case Evaluated():
                self._heard_evaluation(message)

    def _heard_evaluation(self, message: Evaluated) -> None:
        self._evaluated.add(message.version)
        self._evaluation.set()
        if message.failed:
            self.notes = (f"{message.failed} held-out responses could not be scored, last: {message.why}",)
        if message.accuracy is None:
            return
        self.record.evaluated(message.version, message.accuracy)
        goal = self.config.stop_at
        if goal is not None and message.accuracy >= goal and self._training:
            self.control.stop()

    def _on_scored(self, name: str, reward: float) -> None:
        self._failures = 0
        self.control.on_scored(name, reward)

    def _on_score_failed(self, name: str, why: str) -> None:
        if self.control.over:
            return
        self._failures += 1
        self.notes = (f"reward of {name} failed: {why}",)
        if self._failures >= MOST_FAILURES:
            self.crew.fail(f"the reward failed {self._failures} times in a row, last: {why}")
        self.control.on_score_failed(name, why)

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
        if self.server.ledger.version >= self.config.steps:
            return
        self._training = True
        self._instances_busy_s = self.record.instance_busy_s
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        for name, port in self.instances.items():
            if self.crew.children[name].ready.is_set():
                self.control.join(port)
        if self._checkpoint is not None:
            self.control.recover()
        self._trainer.reset()  # its clock begins now
        cpu = {name: child.cpu_s for name, child in self.crew.children.items()}
        for each in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(each, self._interrupt)
        view = self._loop.create_task(self._show_for_ever(), name="view")
        try:
            await self.crew.within(self.control.run(self.config.steps), "training")
        finally:
            view.cancel()
            for each in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(each)
            self._training = False
            self.record.seconds = self.seconds
            self.record.control_s += self._control_s
            self.record.instance_s += len(self.instances) * (time.monotonic() - self._began)
            for port in self.instances.values():
                self.record.instance_busy_s += port.busy_s
            for name, child in self.crew.children.items():
                used = child.cpu_s - (cpu[name] if self.crew.incarnations[name] == 1 else 0.0)
                self.record.cpu_s[name] = self.record.cpu_s.get(name, 0.0) + used

    def _interrupt(self) -> None:
        """Ctrl-C: end in good order. The second one is Python's own."""
        self.interrupted = True
        for each in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(each)
        self.control.stop()

    def _committed(self, step: int, groups: list[Group]) -> None:
        version = step + 1
        self.record.committed(version, self.seconds)
        members = [member for group in groups for member in group.members if member.state == "consumed"]
        if self._report is not None and self._report.step == step:
            self._log_step(self._report, groups, members)
        let_go(groups)
        self.show(self)
        every = self.config.evaluation.every
        if every and version % every == 0 and version < self.config.steps:
            self.crew.send("evaluator", Evaluate(now=self.config.evaluation.when == "during"))
        every = self.config.checkpoints.every
        if every and version % every == 0 and version < self.config.steps:
            self._save(version)

    def _aborted(self, trajectory: Trajectory, _reason: str) -> None:
        self.record.tokens_wasted += trajectory.generated

    def _log_step(self, report: Trained, groups: list[Group], members: list[Trajectory]) -> None:
        """A step is committed: what its trainer said of it goes into the record, and to the log."""
        self.record.trained(
            report.facts, report.token_staleness, report.trajectory_staleness, report.busy_s, report.idle_s
        )
        busy_s = self.record.instance_busy_s + sum(port.busy_s for port in self.instances.values())
        busy_s, self._instances_busy_s = busy_s - self._instances_busy_s, busy_s
        self._metrics.write(
            {
                "step": report.step,
                "time": self.record.seconds,
                **report.facts,
                "token_staleness": report.token_staleness,
                "trajectory_staleness": report.trajectory_staleness,
                "train_s": report.busy_s,
                "idle_s": report.idle_s,
                "instances_busy_s": busy_s,
                "prompt_tokens": sum(member.group.prompt_tokens for member in members),
                "prompts": [group.prompt for group in groups],
                "signal": [differ(group) for group in groups],
                "lengths": [member.generated for member in members],
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
        while version not in self._evaluated and not any(each[0] == version for each in self.record.accuracy):
            self._evaluation.clear()
            self.crew.send("evaluator", Evaluate())
            await self.crew.within(self._evaluation.wait(), "evaluation", START_S)

    def _save(self, version: int) -> asyncio.Event:
        """The trainer gets this before any word of the next step's end, so it is at this version then."""
        folder, state, done = self.directory.checkpoint(version), pack_state(self.server, self.record), asyncio.Event()
        self._saving[folder] = (version, state, done)
        self.outbox.send(self._trainer.save, folder, {STATE: state, ORIGIN: self._origin})
        return done

    def _prune(self) -> None:
        """Keep the latest checkpoints only. One is renamed first, so that a half deleted one has no name to go by."""
        if keep := self.config.checkpoints.keep:
            for folder in checkpoints(self.directory.checkpoints)[:-keep]:
                gone = folder.rename(folder.with_name(f"{REMOVED}{folder.name}"))
                shutil.rmtree(gone, ignore_errors=True)

    async def _end(self) -> None:
        """The last checkpoint, and how good it is."""
        done = self._save(self.server.ledger.version)
        await self.crew.within(done.wait(), "last checkpoint", SAVE_S)
        if not self.interrupted:
            await self._evaluate()

    async def _close(self) -> None:
        self.outbox.close()
        await self._pool.close()
        os.close(self._log)
        await self.crew.stop()
        self.journal.on_durable = lambda: None
        await asyncio.to_thread(self.journal.close)
        self._metrics.close()
        self._decisions.flush()


def differ(group: Group) -> bool:
    """Whether its rewards do: otherwise it teaches nothing."""
    return len({member.reward for member in group.members if member.state == "consumed"}) > 1


def decoder_of(config: Config, model: Path) -> str:
    """What reward workers make text of tokens with."""
    return ADDER if config.data.source == ADDER else str(model / "tokenizer.json")
