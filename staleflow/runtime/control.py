"""The control plane: turns reports into state, state into decisions, and decisions into commands.

It owns no tokens and no weights, reads no wall clock and draws no random number: time is the event loop's, everything
else comes through the ports. So the simulator runs it unchanged::

    control = ControlPlane(settings, server, trainer, rewards, prompts)
    control.join(instance)              # any time; it gets work once it holds a version
    control.drain("i0")                 # any time; ``on_drained`` is called once all it had is back
    await control.run(steps=100)

At the commit of the last version the run is over: from then on nothing that anybody says changes its state.

What drives it: ``on_report`` (instances), ``on_scored`` / ``on_score_failed`` (reward workers), ``on_pushed`` /
``on_trainer_lost`` / ``on_trainer_back`` (trainer). All may be repeated, late or out of order: the server refuses what
is not news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.decide import Decision, decide
from staleflow.coordinator.routing import MOST_ROUTES
from staleflow.coordinator.situation import Abort, Command, Interrupt, Pull, Route, Truncate
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import RunError
from staleflow.runtime.episodes import Environments, Episodes
from staleflow.runtime.feed import TrainerFeed
from staleflow.runtime.fleet import Member
from staleflow.runtime.homes import Homes
from staleflow.runtime.ports import InstancePort, RewardPort, TrainerPort
from staleflow.runtime.reports import Reports
from staleflow.runtime.scoring import Scoring
from staleflow.runtime.situate import MOST_QUEUED, Watch
from staleflow.runtime.watchdog import Looks
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.trajectories import ON_AN_INSTANCE, Prompts, TrajectoryServer
from staleflow.types import Report

LOOK_S = 5.0
"""How often a decision is made when nothing seems to need one."""


@dataclass(frozen=True, slots=True)
class Settings:
    strategies: Strategies
    cost: CostModel
    """What the coordinator believes an engine step costs."""
    cycle_s: float = 0.5
    """At most one decision in this time."""
    instance_timeout_s: float = 60.0
    """An instance that has been silent for this long counts as dead."""
    stall_s: float = 3600.0
    """Without any news for this long, the run ends with an error that says what it waits for."""
    reward_timeout_s: float = 120.0
    reward_tries: int = 3
    pull_s: float = 1.0
    """First guess of how long a pull takes; measured from then on."""


class StalledError(RunError):
    """Nothing has happened for a long time, and nothing will; the message says what the run waits for."""

    exit_code = 1


class ControlPlane:
    def __init__(
        self,
        settings: Settings,
        server: TrajectoryServer,
        trainer: TrainerPort,
        rewards: RewardPort,
        prompts: Prompts,
        term: int = 1,
        environments: Environments | None = None,
    ) -> None:
        """``environments``: who plays the members of groups, where the server is one of episodes."""
        self.settings = settings
        self.term = term
        """Of the control plane; a restart begins the next."""
        self.server = server
        self.ledger = server.ledger
        self.members: dict[str, Member] = {}
        self.watch = Watch(server, self.members, settings.strategies, settings.cost, settings.pull_s)
        self.on_decision: Callable[[float, Decision], None] = lambda _time, _decision: None
        self.on_drained: Callable[[str], None] = lambda _: None
        """An instance that was to leave holds nothing any more, and is no longer a member."""
        self.filter: Callable[[Group], str | None] = lambda _: None
        """Why a complete group is not worth training on, if it is not (no learning signal, say)."""
        self._prompts = prompts
        self.scoring = Scoring(rewards, settings.reward_timeout_s, settings.reward_tries, self._not_scored)
        self.reports = Reports(server, self.scoring, self.watch.gauge, self._release)
        self._feed = TrainerFeed(server, trainer, settings.strategies.consume, self.drop)
        self.episodes: Episodes | None = None
        if environments is not None:
            assert isinstance(server, EpisodeServer)
            self.watch.homes = Homes()
            self.episodes = Episodes(server, environments, self, self.watch.homes)
            self.reports.turned = self.episodes.turned
            self.watch.played = self.episodes.played
        self._work = asyncio.Event()
        self._done = asyncio.Event()
        self._steps: int | None = None
        self._look_at = 0.0
        self._news = True
        """Whether something has happened since the last look."""

    async def run(self, steps: int) -> None:
        """Train until ``steps`` versions have been made."""
        self._steps = steps
        self.watch.gauge.begin(self._now(), self.ledger.version)
        if self.ledger.version >= steps:
            self._end()
            return
        done = asyncio.create_task(self._done.wait(), name=f"run waits for version {steps}")
        tasks = {
            done,
            asyncio.create_task(self._keep_deciding(), name="coordinator waits for something to decide"),
            asyncio.create_task(self._keep_watching(), name="watch over instances"),
        }
        try:
            self.changed()
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()  # the other two end only by an error
        finally:
            self.scoring.close()
            for task in tasks:
                task.cancel()

    @property
    def over(self) -> bool:
        """Whether the last version is made. Tasks, timers and messages that are on their way come too late then."""
        return self._done.is_set()

    async def ended(self) -> None:
        """Until the last version is made."""
        await self._done.wait()

    def stop(self) -> None:
        """End the run now, or with the version of the step that is in training."""
        self._steps = self.ledger.frontier
        if self.ledger.version >= self._steps:
            self._end()

    # Membership

    def join(self, port: InstancePort) -> None:
        """An instance is there, for the first time or in a new incarnation."""
        if self.over:
            return
        heard = port.heard()
        if (known := self.members.get(port.name)) is not None:
            if known.incarnation == heard.incarnation:
                return
            self._lose(known)
        member = self.members[port.name] = Member.of(port, self.term, heard, self.ledger.version)
        self.server.note("join", member.name, member.version)
        if held := port.held():
            self._adopt(member, held)
        self.watch.forget_table()
        self.changed()

    def left(self, name: str) -> None:
        """An instance is known to be dead."""
        if (member := self.members.get(name)) is not None and member.alive and not self.over:
            self._lose(member)
            self.changed()

    def drain(self, name: str) -> None:
        """An instance is to leave. What it has comes back with all its tokens and continues elsewhere."""
        if (member := self.members.get(name)) is None or member.leaving or self.over:
            return
        member.leaving = member.touched = True
        residents = list(member.residents.values())  # also those on their way back: the command may have been lost
        commands: list[Command] = [Interrupt(each.name, name, "leaving") for each in residents]
        self.on_decision(self._now(), Decision(commands, {"drain": name, "context": member.context}))
        for each in residents:
            self.server.interrupt(each.name)
        if residents:
            member.interrupt(residents)
        self.changed()

    def _let_go(self) -> None:
        """Those that were to leave and hold nothing any more, because it came back, ended, was dropped or is lost."""
        for name in [member.name for member in self.members.values() if member.leaving and not member.residents]:
            del self.members[name]
            self.server.note("left", name)
            self.watch.forget_table()
            self.on_drained(name)

    def recover(self, steps: int, reports: Iterable[Report] = (), trainer_there: bool = True) -> None:
        """The server has been replayed from the journal, and the instances that are there have joined: find out what
        happened while nobody was listening. One that joins later has lost what it holds to others.

        ``steps``: as ``run`` will be told. The last version may have been made meanwhile, and then nothing comes after.

        ``reports``: what instances have said since then, or said before and may not have been heard. ``trainer_there``:
        it is known which version the trainer holds, and that it does nothing. One that may still finish what it was
        told before is fed from ``on_trainer_back`` on: a reset would come too late for it."""
        self._steps = steps
        if self.ledger.version >= steps:
            self._end()
            return
        self._feed.away = True  # until everything is known
        for report in reports:
            self.on_report(report)
        here = {name for member in self.members.values() for name in member.residents}
        for each in list(self.server):
            if each.state in ON_AN_INSTANCE and each.name not in here:
                self.server.give_back(each.name, each.epoch, each.spans)
            elif each.state == "generated":
                self.scoring.ask(each)
        if self.episodes is not None:
            self.episodes.recover()
        for group in list(self.server.groups.values()):
            _, surplus = self.server.occupy(group) or (group, [])  # its last score may be all that was written
            if group.complete:
                self._completed(group, surplus)
        if trainer_there:
            self.on_trainer_back()
        self.changed()

    def _adopt(self, member: Member, held: Sequence[tuple[str, int]]) -> None:
        """An instance outlived a control plane: what it holds continues there, unless it is not its any more."""
        for name, epoch in held:
            each = self.server.trajectories.get(name)
            if each and each.state in ON_AN_INSTANCE and (each.instance, each.epoch) == (member.name, epoch):
                member.residents[name] = each
        if strangers := [(name, epoch) for name, epoch in held if name not in member.residents]:
            member.forget(strangers)

    def _lose(self, member: Member) -> None:
        """The instance is dead: what ran there continues elsewhere, from the last token that was streamed."""
        member.alive, member.touched, member.lost_at = False, True, self._now()
        self.server.note("lost", member.name)
        lost = [(each.name, each.epoch) for each in member.residents.values()]
        for each in list(member.residents.values()):
            self.server.give_back(each.name, each.epoch, each.spans)
            self.reports.truncating.discard(each.name)
        member.lost = lost
        member.residents, member.issued, member.pulling = {}, [], None

    # Reports

    def on_report(self, report: Report) -> None:
        member = self.members.get(report.instance)
        if member is None or report.incarnation != member.incarnation or self.over:
            return
        self.watch.reported(member)
        self.reports.take(member, report)
        if report.pulled is not None:
            member.seen = max(member.seen, report.pulled)
            self._pulled(member)
        self.changed()

    def _pulled(self, member: Member) -> None:
        """An instance may hold a version before the trainer has announced it. Until then it counts as holding the
        newest that is known, which is never too young."""
        version = min(member.seen, self.ledger.version)
        if version > member.version:
            self.server.note("pull", member.name, version)
            member.version, member.touched = version, True
            self._renew(member, version)
            self._feed.push_on()
        if member.pulling is not None and member.version >= member.pulling:
            member.pulling = None
            self.watch.gauge.pull_ended(member.name, self._now())

    def on_scored(self, name: str, reward: float) -> None:
        if not self.scoring.answered(name):
            return
        self._news = True
        if completed := self.server.score(name, reward):
            self._completed(*completed)
            self._feed.push_on()

    def _completed(self, group: Group, running: Iterable[Trajectory] = ()) -> None:
        self.drop(running)
        if why := self.filter(group):
            self._release(group, why, again=False)

    def on_score_failed(self, name: str, why: str) -> None:
        self.scoring.failed(name, why)

    def on_pushed(self, version: int) -> None:
        if self._feed.pushed(version):
            self._committed()

    def on_trainer_lost(self) -> None:
        if not self.over and self._feed.lost():
            self._committed()

    def on_trainer_back(self) -> None:
        if not self.over and self._feed.back():
            self._committed()
        self._feed.push_on()

    # Decisions

    async def _keep_deciding(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            if not self._cycle():
                await asyncio.sleep(self.settings.cycle_s)
            else:  # more is to be decided: after what has been said meanwhile
                self._work.set()
                await asyncio.sleep(0)

    def _cycle(self) -> bool:
        """One decision. Whether the next should follow at once: this one was cut, and something came of it."""
        if self.over:
            return False
        now = self._now()
        self._let_go()
        self._admit()
        self.watch.blocking.update(self.ledger, self.settings.strategies.tail_groups, now)
        if not self._anything_to_decide(now):
            return False
        decision = decide(self.watch.situation(now), self.settings.strategies)
        self.on_decision(now, decision)
        return self._obey(decision.commands) > 0 and decision.cut

    def _anything_to_decide(self, now: float) -> bool:
        """Most of the time nothing waits or every place is taken, nobody lags and the step is not nearly done: then a
        look now and then will do, for instances that have run out of memory."""
        strategies = self.settings.strategies
        acts_on_tail = strategies.migration != "off" or strategies.tail != "wait"
        if (
            (self.server.waiting and any(member.has_place for member in self.members.values()))
            or (acts_on_tail and self.watch.blocking.groups)
            or any(member.open and member.holds < self.ledger.version for member in self.members.values())
            or now >= self._look_at
        ):
            self._look_at = now + LOOK_S
            return True
        return False

    def _admit(self) -> None:
        """Draw prompts for the groups that could be reserved now: no more than one decision looks at, and in one cycle
        no more than it places."""
        members = self.server.group_size + self.server.extra_members
        most = min(self.ledger.room(self.ledger.version), -(-MOST_QUEUED // members)) - self.server.fresh
        for _ in range(min(most, -(-MOST_ROUTES // members))):
            if (group := self.server.admit(self._prompts)) is None:
                break
            if self.episodes is not None:
                self.episodes.begin(group)

    def _obey(self, commands: Iterable[Command]) -> int:
        """Carry the commands out. How many trajectories were placed, and how many instances pull that did not."""
        pulls = 0
        submitted: dict[str, list[Trajectory]] = {}
        interrupted: dict[str, list[Trajectory]] = {}
        for command in commands:
            if isinstance(command, Route):
                name, _, instance, version = command
                self.watch.routed += 1
                if placed := self.server.place(name, instance, version):
                    submitted.setdefault(instance, []).append(placed)
                continue
            match command:
                case Interrupt(name, instance, _) | Truncate(name, instance):
                    if self.server.interrupt(name):
                        interrupted.setdefault(instance, []).append(self.server.trajectories[name])
                    if isinstance(command, Truncate):
                        self.reports.truncating.add(name)
                case Pull(instance, version):
                    pulls += self.members[instance].pulling != version
                    self.members[instance].pull(version)
                    self.watch.gauge.pull_began(instance, self._now())
                case Abort(name, why):
                    if (group := self.server.groups.get(name)) is not None:
                        self._release(group, why)
        for instance, trajectories in interrupted.items():
            self.members[instance].interrupt(trajectories)
        for instance, trajectories in submitted.items():
            self.members[instance].submit(trajectories, [self.server.work(each) for each in trajectories])
        return pulls + sum(map(len, submitted.values()))

    def _not_scored(self, trajectory: Trajectory, why: str) -> None:
        """Its prompt gets one more chance: a reward that fails twice for one problem will fail again."""
        self._release(trajectory.group, why, again=trajectory.group.attempt == 0)

    def _release(self, group: Group, why: str, again: bool = True) -> None:
        """Give the group up. ``again``: its prompt is tried once more; else the next one takes its place."""
        if group.name not in self.server.groups or group.name in self.server.leased:
            return  # it was given up before, or it is being trained without this member
        self.drop(self.server.release(group, why, again))
        self._feed.push_on()
        self.changed()

    def drop(self, trajectories: Iterable[Trajectory]) -> None:
        """Tell the instances to drop these."""
        by_instance: dict[str, list[Trajectory]] = {}
        for each in trajectories:
            if each.instance in self.members:
                by_instance.setdefault(each.instance, []).append(each)
        for instance, dropped in by_instance.items():
            self.members[instance].abort(dropped)
            self.changed()
        if self.episodes is not None:
            self.episodes.sweep()

    def give_up(self, group: Group, why: str, again: bool) -> None:
        """An episode of the group has failed too often."""
        self._release(group, why, again)

    def finished(self, longest: Trajectory, completed: tuple[Group, list[Trajectory]] | None) -> None:
        """An episode has ended, and completed its group or not."""
        self.watch.gauge.finished(longest.generated, longest.group.version or 0)
        if completed:
            self._completed(*completed)
            self._feed.push_on()
        self.changed()

    # Within

    def _end(self) -> None:
        self._feed.end()
        self.scoring.close()
        if self.episodes is not None:
            self.episodes.close()
        self._done.set()

    def _committed(self) -> None:
        self.watch.gauge.committed(self._now(), self.ledger.version, self.ledger.max_staleness)
        if self._steps is not None and self.ledger.version >= self._steps:
            self._end()
            return
        for member in self.members.values():
            self._pulled(member)
        self._feed.push_on()
        self.changed()

    def _renew(self, member: Member, version: int) -> None:
        """Groups that had not a single token when their instance pulled are as young as the version it pulled."""
        for each in member.residents.values():
            group = each.group
            if each.spans or group.version is None or group.version >= version or group.complete or group.begun:
                continue
            held = [self.members[peer.instance].version for peer in group.members if peer.instance in self.members]
            self.server.renew(group, max(group.version, min(held)))

    async def _keep_watching(self) -> None:
        """No instance reports its own death, and a stalled run does not report itself: look for both."""
        news_at = self._now()
        looks = Looks(self.settings.instance_timeout_s / 4, news_at)
        while True:
            await asyncio.sleep(looks.interval_s)
            now = self._now()
            if stood_still := looks.stood_still(now):  # what was said meanwhile is heard before the next look
                news_at += stood_still
            else:
                self._watch(now)
            if self._news:
                self._news, news_at = False, now
            if now - news_at > self.settings.stall_s:
                silence = f"nothing was heard for {self.settings.stall_s:g} s"
                raise StalledError(f"{self.watch.stalled()}, {silence}")
            self._work.set()

    @property
    def cost_error(self) -> float:
        """How far the coordinator's cost model is from the steps that the instances measured."""
        return self.watch.table.cost_error

    def _watch(self, now: float) -> None:
        """Find instances that died, that came back, or that are a new incarnation."""
        if self.over:
            return
        for member in self.members.values():
            heard = member.port.heard()
            silent = now - heard.time > self.settings.instance_timeout_s
            if member.alive and (silent or heard.incarnation != member.incarnation):
                self._lose(member)
            again = heard.incarnation != member.incarnation or heard.time > member.lost_at
            if not member.alive and not silent and again:
                member.revive(heard, self.ledger.version)
                self.server.note("join", member.name, member.version)

    def changed(self) -> None:
        self._news = True
        self._work.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
