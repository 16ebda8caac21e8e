"""A whole simulated run: the production control plane over modelled engines, trainer, weights and rewards.

Nothing here decides anything: the cluster builds the parts, connects them and lets faults happen to them. Use::

    cluster = Cluster(preset("paper-14b"), seed=1)
    cluster.run()
    cluster.recorder.trained_tokens, cluster.recorder.violations
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import msgspec

from staleflow.coordinator.decide import Decision, plain
from staleflow.coordinator.situation import Route
from staleflow.rollout.engine import Request
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.outbox import HeldInstance, HeldRewards, HeldTrainer, Outbox
from staleflow.servers.book import let_go, of_group
from staleflow.servers.filters import no_signal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.disk import SimJournal
from staleflow.simulate.engine import SimEngine
from staleflow.simulate.instance import Instance
from staleflow.simulate.network import Network, Remote
from staleflow.simulate.policy import STALEFLOW, Policy
from staleflow.simulate.randomness import Keyed
from staleflow.simulate.recorder import Recorder
from staleflow.simulate.rewards import SimRewards
from staleflow.simulate.rollout import SimRollout
from staleflow.simulate.setting import BLOCK, Setting
from staleflow.simulate.trainer import SimTrainer
from staleflow.simulate.weights import SimWeights
from staleflow.types import TOKEN, Report, TrajectoryNews

DECISION = "decision"
SYNC_S = 0.02
"""How far the journal lags behind in runs in which the control plane may crash."""
STALL_S = 3600.0
"""A run with no news for this long, on top of what training a step may take, is stuck."""


class Cluster:
    rollout_kind: type[SimRollout] = SimRollout

    def __init__(
        self,
        setting: Setting,
        seed: int,
        keep_journal: bool = False,
        shuffle: bool = False,
        policy: Policy = STALEFLOW,
    ) -> None:
        setting.check()
        self.setting = setting
        self.policy = policy
        self.keyed = Keyed(seed)
        self.workload = setting.workload.with_seed(seed)
        self.loop = VirtualLoop(shuffle=seed if shuffle else None)
        self.network = Network(self.loop, self.keyed.generator("network"))
        self.journal = SimJournal(self.loop, keep=keep_journal)
        self.recorder = Recorder(setting.staleness)
        self.weights = SimWeights(setting.weight_bytes, setting.link_bandwidth, setting.total_bandwidth)
        self.trainer = self.new_trainer()
        self.rewards = SimRewards(
            self.loop,
            self.keyed,
            setting.reward_s,
            setting.reward_success if setting.filter != "none" else None,
            self.scored,
        )
        self.control = self.new_control(term=1)
        self.rollouts = [self.new_rollout(f"i{index}") for index in range(setting.instances)]
        self.on_start: list[Callable[[], None]] = []
        """Called when the run starts, with the loop running: faults arm themselves here."""
        self.on_end: list[Callable[[], None]] = []
        """Called when the last step is committed, with the loop still running."""
        self.down = False
        """Whether the control plane is dead."""
        self._killed = asyncio.Event()
        self._down_s = 0.0
        self._undelivered: list[Report] = []
        self.lies: dict[str, int] = {}
        """How many of the next reports of an instance are made impossible."""
        self._targets: dict[str, int] = {}

    def run(self) -> None:
        """Simulate until the setting's steps are trained."""
        collecting = gc.isenabled()
        gc.disable()  # nothing here needs it, and it would look at every live trajectory again and again
        try:
            self.loop.run(self._run())
        finally:
            if collecting:
                gc.enable()

    async def _run(self) -> None:
        for rollout in self.rollouts:
            self.join(rollout)
        for start in self.on_start:
            start()
        while not await self._term():
            await asyncio.sleep(self._down_s)
            self._recover()
        for end in self.on_end:
            end()

    async def _term(self) -> bool:
        """Run one term of the control plane. Returns whether it reached the end of the run."""
        run = asyncio.create_task(self._to_the_end(), name="the run")
        killed = asyncio.create_task(self._killed.wait(), name="kill of the control plane")
        finished, _ = await asyncio.wait({run, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if run in finished:
            run.result()
            return True
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        return False

    async def _to_the_end(self) -> None:
        await self.control.run(self.setting.steps)
        while self.journal.durable < self.journal.position:
            await asyncio.sleep(self.journal.sync_s)

    def kill_control(self, down_s: float) -> None:
        """The control plane dies and loses what it did not write to the journal; it is back after ``down_s``."""
        if not self.down:
            self.down, self._down_s = True, down_s
            self.outbox.close()
            self.journal.crash()
            self._killed.set()

    def kill_trainer(self, down_s: float, after_push: bool) -> None:
        """The trainer dies: now, or right after its next version is durable and before it is announced."""
        if self.trainer.alive:
            self.trainer.die(after_push, lambda: self._trainer_died(down_s))

    def _trainer_died(self, down_s: float) -> None:
        if not self.down:
            self.control.on_trainer_lost()
        self.loop.call_later(down_s, self._trainer_back)

    def _trainer_back(self) -> None:
        self.trainer.start_again()
        if not self.down:
            self.control.on_trainer_back()

    def _recover(self) -> None:
        self._killed.clear()
        self.journal.reopen()
        self.control = self.new_control(self.control.term + 1)
        for rollout in self.rollouts:
            self.join(rollout)
        self.down = False
        if not self.trainer.alive:
            self.control.on_trainer_lost()
        reports, self._undelivered = self._undelivered, []
        self.control.recover(reports)

    # Parts

    def journal_faults(self) -> None:
        """Keep the journal's events, which a restart of the control plane needs, and let a crash lose the latest."""
        self.journal.keep = True
        self.journal.sync_s = SYNC_S

    def join(self, rollout: SimRollout) -> None:
        self.control.join(HeldInstance(Remote(rollout, self.network), self.outbox))

    def new_control(self, term: int) -> ControlPlane:
        setting = self.setting
        ledger = self.policy.ledger(setting.groups, setting.staleness, setting.redundancy)
        server = TrajectoryServer(ledger, setting.group_size, setting.extra_members, self.journal)
        server.replay(self.journal.events)
        settings = Settings(
            setting.strategies,
            setting.rollout,
            cycle_s=setting.cycle_s,
            pull_s=setting.weight_bytes / setting.link_bandwidth,
            stall_s=STALL_S + self._longest_step_s(),
        )
        self.outbox = outbox = Outbox(self.journal)
        self.journal.on_durable = outbox.release
        server.on_aborted = lambda trajectory, reason: outbox.send(self._aborted, trajectory, reason)
        server.on_committed = lambda step, groups: outbox.send(self._committed, step, groups)
        control = self.policy.control(
            settings, server, HeldTrainer(self.trainer, outbox), HeldRewards(self.rewards, outbox), self, term
        )
        control.on_decision = self._decided
        control.filter = no_signal if setting.filter != "none" else control.filter
        return control

    def _longest_step_s(self) -> float:
        """The most that training a step takes: with few GPUs, many hours in which nothing else happens."""
        setting, trainer = self.setting, self.setting.trainer
        tokens = setting.groups * setting.group_size * setting.longest()
        return trainer.train_s(tokens) + trainer.fixed_s + trainer.push_s

    def new_trainer(self) -> SimTrainer:
        return SimTrainer(self.loop, self.setting.trainer, self.weights, self.pushed, self._trainer_waits_for)

    def new_rollout(self, name: str, speed: float = 1.0) -> SimRollout:
        setting = self.setting
        if setting.speed_spread:
            speed *= 1 + setting.speed_spread * (2 * self.keyed.uniform("speed", name) - 1)
        blocks, limits = setting.kv_tokens // BLOCK, (setting.max_running, setting.prefill_tokens)
        model = Instance(setting.rollout, blocks, BLOCK, *limits, speed)
        engine = SimEngine(model, self._target_of, version=-1, left=self.recorder.left)
        return self.rollout_kind(name, self.loop, engine, self.weights, self.report)

    # What the parts report to the control plane. They look it up each time: it may have been replaced.

    def report(self, report: Report) -> None:
        if self.lies.get(report.instance):
            self.lies[report.instance] -= 1
            report = msgspec.structs.replace(
                report,
                finished=[impossible(each) for each in report.finished],
                progress=[impossible(each) for each in report.progress],
            )
        self.network.send(self._hear, report)

    def _hear(self, report: Report) -> None:
        if self.down:
            self._undelivered.append(report)
        else:
            self.control.on_report(report)

    def scored(self, name: str, reward: float) -> None:
        if not self.down:
            self.control.on_scored(name, reward)

    def pushed(self, version: int) -> None:
        if self.down:
            return
        if self.setting.strategies.migration == "gain":  # somebody will ask how large everything is
            for rollout in self.rollouts:
                rollout.stream()
        self.control.on_pushed(version)

    # What the parts ask for

    def tokens(self, prompt: int) -> int | None:
        """Length of a prompt, as the prompt source gives it; None past the end of the data."""
        if self.setting.prompts is not None and prompt >= self.setting.prompts:
            return None
        return self.workload.prompt_tokens(prompt)

    def ids(self, prompt: int) -> bytes:
        """Tokens of a prompt: all 0, as are those that modelled engines make."""
        return bytes(TOKEN.itemsize * self.workload.prompt_tokens(prompt))

    def _target_of(self, request: Request) -> int:
        """Tokens the trajectory will have at its end: known to its engine only, never to a scheduler."""
        target = self._targets.get(request.name)
        if target is None:
            name = request.group or ""
            group = self.control.server.groups.get(name)
            prompt, attempt = (group.prompt, group.attempt) if group else of_group(name)
            member = int(request.name.rpartition("/")[2])
            version = self.control.ledger.version  # fixed when it starts; matters only if lengths drift
            target = self._targets[request.name] = self.workload.length(prompt, member, attempt, version)
        return target

    def _trainer_waits_for(self) -> str:
        """Why the trainer is idle: it waits for the tail, or too few groups are complete."""
        return "tail" if self.control.ledger.blocking() else "generation"

    # What is recorded

    def _committed(self, step: int, groups: list[Group]) -> None:
        self.recorder.committed(self.loop.time(), step, groups)
        for group in groups:
            for member in group.members:
                self._targets.pop(member.name, None)
        let_go(groups)

    def _aborted(self, trajectory: Trajectory, reason: str) -> None:
        self.recorder.aborted(trajectory, reason)
        if trajectory.group.prompt not in self.control.server.attempts:
            self.recorder.given_up.add(trajectory.group.prompt)
        self._targets.pop(trajectory.name, None)

    def _decided(self, now: float, decision: Decision) -> None:
        if decision.commands:
            commands = plain(each for each in decision.commands if not isinstance(each, Route))  # routes are events
            self.journal.append((DECISION, now, decision.inputs, commands))


def impossible(news: TrajectoryNews) -> TrajectoryNews:
    """The same news with spans that cannot be true."""
    return msgspec.structs.replace(news, spans=((999, 1),))
