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
from staleflow.runtime.episodes import Environments
from staleflow.runtime.outbox import HeldInstance, HeldRewards, HeldTrainer, Outbox
from staleflow.servers.book import let_go, of_group
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.filters import no_signal
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.simulate.clock import VirtualLoop
from staleflow.simulate.disk import SimJournal
from staleflow.simulate.engine import SimEngine
from staleflow.simulate.environments import SimEnvironments
from staleflow.simulate.instance import Instance
from staleflow.simulate.network import Network, Remote
from staleflow.simulate.policy import STALEFLOW, Policy
from staleflow.simulate.randomness import Keyed
from staleflow.simulate.recorder import Recorder
from staleflow.simulate.rewards import SimRewards
from staleflow.simulate.rollout import SimRollout
from staleflow.simulate.setting import BLOCK, Setting
from staleflow.simulate.trainer import SimTrainer, TrainerLink
from staleflow.simulate.weights import SimWeights
from staleflow.tasks.task import Problem
from staleflow.types import TOKEN, Report, TrajectoryNews
from staleflow.workers.rollout import stream_s

DECISION = "decision"
NOTHING = Problem("", {})
"""What modelled environments need to know of a prompt."""
SYNC_S = 0.02
"""How far the journal lags behind in runs in which the control plane may crash."""
STALL_S = 3600.0
"""A run with no news for this long, on top of what training a step may take, is stuck."""


class Cluster:
    rollout_kind: type[SimRollout] = SimRollout
    environments_kind: type[SimEnvironments] = SimEnvironments

    def __init__(
        self,
        setting: Setting,
        seed: int,
        keep_journal: bool = False,
        shuffle: bool = False,
        policy: Policy = STALEFLOW,
        instance_timeout_s: float = 60.0,
    ) -> None:
        """``instance_timeout_s``: no less than ``HEARTBEAT_S``, or instances that are well are taken for dead."""
        setting.check()
        self.setting = setting
        self.policy = policy
        self._instance_timeout_s = instance_timeout_s
        self.keyed = Keyed(seed)
        self.workload = setting.workload.with_seed(seed)
        self.loop = VirtualLoop(shuffle=seed if shuffle else None)
        self.network = Network(self.loop, self.keyed.generator("network"))
        self.journal = SimJournal(self.loop, keep=keep_journal)
        self.recorder = Recorder(setting.staleness)
        self.weights = SimWeights(setting.weight_bytes, setting.link_bandwidth, setting.total_bandwidth)
        self._targets: dict[str, int] = {}
        self.trainer = self.new_trainer()
        self.rewards = SimRewards(
            self.loop,
            self.keyed,
            setting.reward_s,
            setting.reward_success if setting.filter != "none" else None,
            self.scored,
            self.score_failed,
        )
        self.environments = self.environments_kind(self)
        self.control = self.new_control(term=1)
        self._trainer_link.incarnation = self.trainer.incarnation
        self.rollouts = [self.new_rollout(f"i{index}") for index in range(setting.instances)]
        self.on_start: list[Callable[[], None]] = []
        """Called when the run starts, with the loop running: faults arm themselves here."""
        self.on_end: list[Callable[[], None]] = []
        """Called when the last step is committed, with the loop still running."""
        self.on_step: list[Callable[[int, list[Group]], None]] = []
        """Called for every step that is committed, with its groups."""
        self.on_decision: Callable[[float, Decision], None] = lambda _now, _decision: None
        self.leaving: set[str] = set()
        """Instances that were told to leave."""
        self.down = False
        """Whether the control plane is dead."""
        self.standstill_s = STALL_S + self._longest_step_s()
        """The longest that a version may take."""
        self._killed = asyncio.Event()
        self._down_s = 0.0
        self._lossy = False
        """Whether what was on its way when the control plane died is lost."""
        self._undelivered: list[Report] = []
        self.lies: dict[str, int] = {}
        """How many of the next reports of an instance are made impossible."""

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

    def kill_control(self, down_s: float, survives: float = 0.0, messages_survive: bool = True) -> None:
        """The control plane dies and is back after ``down_s``. Of what it had not synced, a share ``survives``. What
        was said to others and is on its way may arrive, and what they say meanwhile may wait for the next one."""
        if self.down:
            return
        self.down, self._down_s, self._lossy = True, down_s, not messages_survive
        self.outbox.close()
        self.journal.crash(survives)
        for channel in self.network.channels("from trainer", "to rewards", "from rewards"):
            channel.cut()
        if self._lossy:
            for channel in self.network.channels():
                channel.cut()
        self._killed.set()

    def kill_trainer(self, down_s: float, after_push: bool) -> None:
        """The trainer dies: now, or right after its next version is durable and before it is announced."""
        if self.trainer.alive:
            self.trainer.die(after_push, lambda: self._trainer_died(down_s))

    def _trainer_died(self, down_s: float) -> None:
        self.network.channel("to trainer").cut()
        self.network.channel("from trainer").send(self._hear_of_death, self.trainer.incarnation)
        self.loop.call_later(down_s, self._trainer_back)

    def _hear_of_death(self, incarnation: int) -> None:
        if not self.down and self._trainer_link.incarnation == incarnation:
            self.control.on_trainer_lost()

    def _trainer_back(self) -> None:
        self.trainer.start_again()
        self._trainer_connected(self._trainer_link)

    def _trainer_connected(self, link: TrainerLink) -> None:
        """A trainer has found the control plane of this link, if that still lives: what it says comes after all that
        those before it had said."""
        if link is not self._trainer_link:
            return
        incarnation, up = self.trainer.incarnation, self.network.channel("from trainer")
        self.trainer.connected(lambda _: up.send(self._hear_trainer, link, incarnation))

    def _hear_trainer(self, link: TrainerLink, incarnation: int) -> None:
        if not self.down and link is self._trainer_link and link.incarnation != incarnation:
            link.incarnation = incarnation
            self.control.on_trainer_lost()
            self.control.on_trainer_back()

    def hang(self, rollout: SimRollout, seconds: float) -> None:
        rollout.hang(seconds)
        self.loop.call_later(seconds, self.reconnect, rollout)

    def crash(self, rollout: SimRollout, down_s: float, noticed: bool) -> None:
        """An instance dies and starts again. ``noticed``: at once, as by the end of its connection."""
        if rollout.up:
            rollout.crash()
            if noticed and not self.down:
                self.control.left(rollout.name)
            self.loop.call_later(down_s, self._restart, rollout, noticed)

    def _restart(self, rollout: SimRollout, noticed: bool) -> None:
        rollout.restart()
        self.reconnect(rollout, noticed)

    def reconnect(self, rollout: SimRollout, again: bool = False) -> None:
        """An instance that the control plane does not know joins; ``again``: one that it knows as well."""
        if not self.down and rollout.up and not rollout.hung and (again or rollout.name not in self.control.members):
            self.join(rollout)
            if rollout.name in self.leaving:
                self.control.drain(rollout.name)

    def _recover(self) -> None:
        self._killed.clear()
        self.journal.reopen()
        self.control = self.new_control(self.control.term + 1)
        self.down = False
        for rollout in self.rollouts:
            self.reconnect(rollout)
        reports, self._undelivered = self._undelivered, []
        to_trainer = self.network.channel("to trainer")
        if self.trainer.at_rest and to_trainer.clear and self.control.term % 2 == 0:  # it has been asked already
            self._trainer_link.incarnation = self.trainer.incarnation
            self.control.recover(self.setting.steps, reports)
        else:
            self.control.recover(self.setting.steps, reports, trainer_there=False)
            to_trainer.send(self._trainer_connected, self._trainer_link)

    # Parts

    def journal_faults(self) -> None:
        """Keep the journal's events, which a restart of the control plane needs, and let a crash lose the latest."""
        self.journal.keep = True
        self.journal.sync_s = SYNC_S

    def join(self, rollout: SimRollout) -> None:
        self.control.join(HeldInstance(Remote(rollout, self.network), self.outbox))

    @property
    def staying(self) -> list[SimRollout]:
        return [each for each in self.rollouts if each.name not in self.leaving]

    def add(self, speed: float = 1.0) -> None:
        """One more instance, as by ``staleflow scale``."""
        rollout = self.new_rollout(f"i{len(self.rollouts)}", speed)
        self.rollouts.append(rollout)
        if not self.down:
            self.join(rollout)

    def leave(self, rollout: SimRollout) -> None:
        """Let an instance go, as by ``staleflow scale``: for good, once the control plane has drained it."""
        self.leaving.add(rollout.name)
        if not self.down:
            self.control.drain(rollout.name)

    def _drained(self, name: str) -> None:
        next(each for each in self.rollouts if each.name == name).leave()

    def new_control(self, term: int) -> ControlPlane:
        setting = self.setting
        ledger = self.policy.ledger(setting.groups, setting.staleness, setting.redundancy)
        kind = EpisodeServer if setting.turns > 1 else TrajectoryServer
        server = kind(ledger, setting.group_size, setting.extra_members, self.journal)
        self._replay(server)
        settings = Settings(
            setting.strategies,
            setting.believed or setting.rollout,
            cycle_s=setting.cycle_s,
            instance_timeout_s=self._instance_timeout_s,
            pull_s=setting.weight_bytes / setting.link_bandwidth,
            stall_s=STALL_S + self._longest_step_s(),
        )
        self.outbox = outbox = Outbox(self.journal)
        self.journal.on_durable = outbox.release
        server.on_aborted = lambda trajectory, reason: outbox.send(self._aborted, server, trajectory, reason)
        server.on_committed = lambda step, groups: outbox.send(self._committed, step, groups)
        self._trainer_link = TrainerLink(self.trainer, self.network.channel("to trainer"), None)
        trainer, rewards = HeldTrainer(self._trainer_link, outbox), HeldRewards(RewardLink(self), outbox)
        self.environments.close()
        played = Environments(self.environments, lambda _: NOTHING, hold=outbox.send) if setting.turns > 1 else None
        control = self.policy.control(settings, server, trainer, rewards, self, term, played)
        self.environments.episodes = control.episodes
        control.on_decision = self._decided
        control.on_drained = lambda name: outbox.send(self._drained, name)
        control.filter = no_signal if setting.filter != "none" else control.filter
        return control

    def _replay(self, server: TrajectoryServer) -> None:
        """What was written and not told to anybody is told now."""
        events, released = self.journal.events, self.journal.released
        server.replay(events[:released])
        server.on_aborted = lambda trajectory, reason: self._aborted(server, trajectory, reason)
        server.on_committed = self._committed
        server.replay(events[released:])

    def _longest_step_s(self) -> float:
        """The most that training a step takes: with few GPUs, many hours in which nothing else happens."""
        setting, trainer = self.setting, self.setting.trainer
        tokens = setting.groups * setting.group_size * setting.longest()
        return trainer.train_s(tokens) + trainer.fixed_s + trainer.push_s

    def new_trainer(self) -> SimTrainer:
        setting = self.setting
        parts = (self.loop, setting.trainer, setting.groups, self.weights, self.pushed, self._trainer_waits_for)
        return SimTrainer(*parts)

    def new_rollout(self, name: str, speed: float = 1.0) -> SimRollout:
        setting = self.setting
        if setting.speed_spread:
            speed *= 1 + setting.speed_spread * (2 * self.keyed.uniform("speed", name) - 1)
        blocks, limits = setting.kv_tokens // BLOCK, (setting.max_running, setting.prefill_tokens)
        model = Instance(setting.rollout, blocks, BLOCK, *limits, speed)
        engine = SimEngine(model, self._target_of, version=-1, left=self.recorder.left)
        every_s = stream_s(setting.instances)
        return self.rollout_kind(name, self.loop, engine, self.weights, self.report, every_s)

    # What the parts report to the control plane. They look it up each time: it may have been replaced.

    def report(self, report: Report) -> None:
        if self.lies.get(report.instance):
            self.lies[report.instance] -= 1
            report = msgspec.structs.replace(
                report,
                finished=[impossible(each) for each in report.finished],
                progress=[impossible(each) for each in report.progress],
            )
        self.network.channel("reports", report.instance).send(self._hear, report)

    def _hear(self, report: Report) -> None:
        if not self.down:
            self.control.on_report(report)
        elif not self._lossy:
            self._undelivered.append(report)

    def scored(self, name: str, reward: float) -> None:
        if not self.down:
            self.network.channel("from rewards").send(self._hear_score, name, reward)

    def _hear_score(self, name: str, reward: float) -> None:
        if not self.down:
            self.control.on_scored(name, reward)

    def score_failed(self, name: str, why: str) -> None:
        if not self.down:
            self.network.channel("from rewards").send(self._hear_failure, name, why)

    def _hear_failure(self, name: str, why: str) -> None:
        if not self.down:
            self.control.on_score_failed(name, why)

    def pushed(self, version: int) -> None:
        self.network.channel("from trainer").send(self._hear_push, version)

    def _hear_push(self, version: int) -> None:
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
        return self._length_of(request.name, request.group or "")

    def _length_of(self, name: str, of: str) -> int:
        target = self._targets.get(name)
        if target is None:
            group = self.control.server.groups.get(of)
            prompt, attempt = (group.prompt, group.attempt) if group else of_group(of)
            member = int(name.rpartition("/")[2])
            version = self.control.ledger.version  # fixed when it starts; matters only if lengths drift
            target = self._targets[name] = self.workload.length(prompt, member, attempt, version)
        return target

    def size_of(self, episode: str) -> tuple[int, int]:
        """Tokens of its prompt, and those that it will make."""
        group = self.control.server.trajectories[episode].group
        return group.prompt_tokens, self._length_of(episode, group.name)

    def _trainer_waits_for(self) -> str:
        """Why the trainer is idle: it waits for the tail, or too few groups are complete."""
        return "tail" if self.control.ledger.blocking() else "generation"

    # What is recorded

    def _committed(self, step: int, groups: list[Group]) -> None:
        self.recorder.committed(self.loop.time(), step, groups)
        for tell in self.on_step:
            tell(step, groups)
        for group in groups:
            for member in group.members:
                self._targets.pop(member.name, None)
        let_go(groups)

    def _aborted(self, server: TrajectoryServer, trajectory: Trajectory, reason: str) -> None:
        self.recorder.aborted(trajectory, reason)
        if trajectory.group.prompt not in server.attempts:
            self.recorder.given_up.add(trajectory.group.prompt)
        self._targets.pop(trajectory.name, None)

    def _decided(self, now: float, decision: Decision) -> None:
        self.on_decision(now, decision)
        if decision.commands:
            commands = plain(each for each in decision.commands if not isinstance(each, Route))  # routes are events
            self.journal.append((DECISION, now, decision.inputs, commands))


class RewardLink:
    """``RewardPort`` of the reward workers at the other end of the network."""

    def __init__(self, cluster: Cluster) -> None:
        self._rewards = cluster.rewards
        self._channel = cluster.network.channel("to rewards")

    def score(self, trajectory: Trajectory) -> None:
        self._channel.send(self._rewards.score, trajectory.name)


def impossible(news: TrajectoryNews) -> TrajectoryNews:
    """The same news with spans that cannot be true."""
    return msgspec.structs.replace(news, spans=((999, 1),))
