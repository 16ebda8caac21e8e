"""Every live group and trajectory, as the events say. State changes only by applying events.

``TrajectoryServer`` decides which events may happen and writes them; this is the part that a replay needs. An event is
applied by the method named after it, ``_on_admit`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from staleflow.protocol import REDUNDANT, Ledger
from staleflow.servers.journal import NOTES, Event
from staleflow.servers.lifecycle import Branch, Group, Trajectory
from staleflow.servers.made import MadeStep
from staleflow.servers.payloads import Payloads
from staleflow.types import GIVEN, Spans, episode_of, made_count


class Book:
    def __init__(self, ledger: Ledger, group_size: int, extra_members: int, payloads: Payloads | None = None) -> None:
        self.ledger = ledger
        self.group_size = group_size
        self.extra_members = extra_members
        self.payloads = payloads
        self.groups: dict[str, Group] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.owed: list[int] = []
        """Prompts whose groups were given up, to be drawn again before new ones."""
        self.leased: list[str] = []
        """Groups of the step that is being trained."""
        self.next_prompt = 0
        self.attempts: dict[int, int] = {}
        self.keeps_steps = False
        """Whether the payload of a committed step stays on disk until ``forget``."""
        self.made: dict[int, MadeStep] = {}
        """By step: what it was made of."""
        self.on_aborted: Callable[[Trajectory, str], None] = lambda _trajectory, _reason: None
        """Called for every trajectory that ends without being trained, with the reason."""
        self.on_committing: Callable[[int, list[Group]], None] = lambda _step, _groups: None
        """Called before a step is committed, with its groups: what is written here is there for every step that is."""
        self.on_committed: Callable[[int, list[Group]], None] = lambda _step, groups: let_go(groups)
        """Called for every step that is committed, with its groups. Whoever listens calls ``let_go`` on them."""
        self._handlers: dict[str, Callable[..., None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }
        self._fresh: dict[str, Group] = {}
        """Groups that are not reserved, and have members that wait for an instance."""
        self._hidden: dict[str, Group] = {}
        """Groups that are not reserved, and whose environments have not asked for a turn."""
        self._resuming: dict[str, Trajectory] = {}
        """Queued members of groups that are reserved."""
        self._dropped: list[str] = []
        """Names whose payload the event that is being applied makes needless."""
        self._news: list[Callable[[], None]] = []
        """Calls of listeners for the event that is being applied, made once it is written."""

    def hold(self, group: Group) -> None:
        """A group is live from now on."""
        self.groups[group.name] = group
        for member in group.members:
            self.trajectories[member.name] = member
        if group.version is None:
            asked = any(each.state == "queued" for each in group.members)
            (self._fresh if asked else self._hidden)[group.name] = group
        if self.payloads is not None:
            self.payloads.admit(group.name, [each.name for each in group.members if each.state != "aborted"])

    @property
    def resuming(self) -> list[str]:
        """Members of reserved groups that wait for an instance, in the order they came."""
        return list(self._resuming)

    def resume(self, names: Iterable[str]) -> None:
        self._resuming = {name: self.trajectories[name] for name in names}

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories.values())

    # Events

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events that were written before."""
        for event in events:
            if event[0] not in NOTES:
                self._apply(event)
                if self._dropped:
                    self._dropped.clear()
                if self._news:
                    self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, []
        for tell in news:
            tell()

    def _apply(self, event: Event) -> None:
        self._handlers[event[0]](*event[1:])

    def _on_admit(self, prompt: int, attempt: int, prompt_tokens: int, plays: bool = False) -> None:
        if self.owed and self.owed[0] == prompt:
            self.owed.pop(0)
        else:
            self.next_prompt = prompt + 1
        self.attempts[prompt] = attempt + 1
        group = Group(group_name(prompt, attempt), prompt, attempt, prompt_tokens, self.group_size)
        group.members = [
            Trajectory(f"{group.name}/{member}", group) for member in range(self.group_size + self.extra_members)
        ]
        if plays:
            for each in group.members:
                each.state, each.branch = "waiting", Branch()
        self.hold(group)

    def _on_reserve(self, name: str, version: int) -> None:
        if not self.ledger.reserve(name, version):
            raise ValueError(f"group {name} cannot be reserved with version {version}: the ledger has no room")
        group = self._fresh.pop(name)
        group.version = version
        for member in group.members:
            if member.state == "queued":
                self._resuming[member.name] = member

    def _on_lower(self, name: str, version: int) -> None:
        if not self.ledger.lower(name, version):
            raise ValueError(f"group {name} cannot be lowered to version {version}: the ledger has no room")
        self.groups[name].version = version

    def _on_renew(self, name: str, version: int) -> None:
        self.ledger.renew(name, version)
        self.groups[name].version = version

    def _on_route(self, name: str, instance: str, epoch: int) -> None:
        trajectory = self.trajectories[name]
        trajectory.go("running")
        trajectory.instance, trajectory.epoch = instance, epoch
        del self._resuming[name]

    def _on_stream(self, name: str, spans: Spans) -> None:
        self.trajectories[name].stamp(spans)

    def _on_interrupt(self, name: str) -> None:
        self.trajectories[name].go("interrupted")
        self.trajectories[name].moves += 1

    def _on_requeue(self, name: str) -> None:
        trajectory = self.trajectories[name]
        trajectory.go("queued")
        trajectory.instance = None
        self._resuming[name] = trajectory

    def _on_misreport(self, name: str, why: str) -> None:  # noqa: ARG002  # the reason is for those who read the journal
        self.trajectories[name].faults += 1
        if self.trajectories[name].state != "queued":
            self._on_requeue(name)

    def _on_generated(self, name: str, spans: Spans) -> None:
        trajectory = self.trajectories[name]
        trajectory.go("generated")
        trajectory.stamp(spans)
        trajectory.instance = None
        self._resuming.pop(name, None)
        if self.payloads is not None:
            self.payloads.seal(name)

    def _on_score(self, name: str, reward: float) -> None:
        trajectory = self.trajectories[name]
        trajectory.go("scored")
        trajectory.reward = reward
        trajectory.group.scored += 1

    # Events of episodes

    def _on_given(self, name: str, count: int, until: int) -> None:
        """The environment asks for a turn, after these tokens."""
        each = self.trajectories[name]
        each.go("queued")
        each.epoch += 1  # whatever is still said of the turn before is old
        branch_of(each).until = until
        if count:
            last = each.spans[-1][1] if each.spans and each.spans[-1][0] == GIVEN else 0
            each.stamp((*(each.spans[:-1] if last else each.spans), (GIVEN, last + count)))
        if each.group.version is not None:
            self._resuming[name] = each
        elif self._hidden.pop(each.group.name, None):
            self._fresh[each.group.name] = each.group

    def _on_turn(self, name: str, spans: Spans, reason: str) -> None:
        """The model's turn ended: the environment goes on."""
        each = self.trajectories[name]
        each.go("waiting")
        each.stamp(spans)
        each.instance = None
        self._resuming.pop(name, None)
        branch_of(each).turns.append((each.generated, reason))

    def _on_branch(self, parent: str, shared: int) -> None:
        origin = self.trajectories[parent]
        first = self.trajectories[episode_of(parent)]
        branch_of(first).opened += 1
        name = f"{first.name}~{branch_of(first).opened}"
        branch = Branch(parent, shared, min(shared, origin.prompt_tokens))
        each = self.trajectories[name] = Trajectory(name, origin.group, "waiting", branch=branch)
        if taken := shared - branch.prompt:
            each.stamp(((GIVEN, taken),))
        each.group.members.append(each)
        if self.payloads is not None:
            self.payloads.open(name)

    def _on_ended(self, name: str, reward: float, masked: bool) -> None:
        """The environment has ended the episode: its branches have what they have."""
        group = self.trajectories[name].group
        for each in branches(group, name):
            self._resuming.pop(each.name, None)
            if not made_count(each.spans):
                self._abort(each, "no turn")
                continue
            each.go("generated")
            each.go("scored")
            each.instance, each.reward = None, reward
            branch_of(each).masked = masked
            if self.payloads is not None:
                self.payloads.seal(each.name)
        group.scored += 1

    def _on_again(self, name: str, why: str) -> None:
        """The episode begins anew: what it had is waste, and so are its branches."""
        each = self.trajectories[name]
        for later in branches(each.group, name)[1:]:
            self._abort(later, why)
            del self.trajectories[later.name]
            each.group.members.remove(later)
        if each.spans:
            waste = Trajectory(name, each.group, "aborted", each.epoch, spans=each.spans, generated=each.generated)
            self._news.append(lambda: self.on_aborted(waste, why))
        if each.state != "waiting":
            each.go("waiting")
        self._resuming.pop(name, None)
        each.stamp(())
        each.epoch, each.instance = each.epoch + 1, None
        branch = branch_of(each)
        branch.until, branch.turns, branch.tries = 0, [], branch.tries + 1
        if self.payloads is not None:
            self.payloads.clear(name)
        group = each.group
        if group.name in self._fresh and not any(peer.state == "queued" for peer in group.members):
            self._hidden[group.name] = self._fresh.pop(group.name)

    # Events of groups

    def _on_occupy(self, name: str) -> None:
        group = self.groups[name]
        self.ledger.occupy(name)
        group.complete = True
        for member in group.members:
            if member.state == "scored":
                member.go("complete")
            else:
                self._abort(member, "surplus")

    def _on_release(self, name: str, reason: str, again: bool) -> None:
        if self.groups[name].version is not None:
            self.ledger.release(name, reason)
        self._forget([name], reason, again)

    def _on_lease(self, names: tuple[str, ...]) -> None:
        if (taken := self.ledger.take(len(names))) != list(names):
            raise ValueError(f"the journal leased {names}, the ledger {taken}")
        self.leased += names

    def _on_consume(self, names: tuple[str, ...], aborted: tuple[str, ...]) -> None:
        if (batch := self.ledger.consume(rank=self._progress)).groups != list(names):
            raise ValueError(f"the journal consumed {names}, the ledger {batch.groups}")
        self.leased = list(names)
        self._forget(aborted, REDUNDANT)

    def _on_commit(self, step: int) -> None:
        self.ledger.commit(step)
        groups = [self.groups.pop(name) for name in self.leased]
        needless = list(self.leased)
        for group in groups:
            self.attempts.pop(group.prompt, None)
            for member in group.members:
                del self.trajectories[member.name]
                if member.state == "complete":
                    member.go("consumed")
                    needless.append(member.name)
        self._drop(needless, self.keeps_steps)
        if self.keeps_steps:
            self.made[step] = MadeStep.of(groups)
        self.leased = []
        self._news.append(lambda: self.on_committed(step, groups))

    def _on_forget(self, version: int) -> None:
        for step in [step for step in self.made if step < version]:
            self._dropped += self.made.pop(step).names()

    def _on_rollback(self, step: int) -> None:
        self.ledger.rollback(step)
        self.leased = []

    # Within

    def _forget(self, names: Iterable[str], reason: str, again: bool = True) -> list[Trajectory]:
        """Drop groups that were given up and owe their prompts, if ``again``. Returns members that may still run."""
        running: list[Trajectory] = []
        for name in names:
            group = self.groups.pop(name)
            self._fresh.pop(name, None)
            self._hidden.pop(name, None)
            if again:
                self.owed.append(group.prompt)
            else:
                self.attempts.pop(group.prompt, None)
            running += still_running(group)
            for member in group.members:
                del self.trajectories[member.name]
                self._abort(member, reason)
            let_go([group])
            self._drop([name])
        return running

    def _drop(self, names: Sequence[str], stays: bool = False) -> None:
        """The payload of trajectories and the prompts of groups are no longer needed in memory, nor on disk unless they
        stay."""
        if self.payloads is not None:
            self.payloads.drop(names)
            if not stays:
                self._dropped += names

    def _progress(self, name: str) -> float:
        """What is given up first where redundancy admitted too much: the group with the fewest scored members."""
        return self.groups[name].scored

    def _abort(self, member: Trajectory, reason: str) -> None:
        self._resuming.pop(member.name, None)
        if member.state != "aborted":
            member.go("aborted")
            self._drop([member.name])
            self._news.append(lambda: self.on_aborted(member, reason))


def group_name(prompt: int, attempt: int) -> str:
    return f"p{prompt}" if attempt == 0 else f"p{prompt}.{attempt}"


def of_group(name: str) -> tuple[int, int]:
    """The prompt and the attempt that a group's name stands for."""
    prompt, _, attempt = name[1:].partition(".")
    return int(prompt), int(attempt or 0)


def branch_of(trajectory: Trajectory) -> Branch:
    if trajectory.branch is None:
        raise ValueError(f"trajectory {trajectory.name} is not played by an environment")
    return trajectory.branch


def branches(group: Group, episode: str) -> list[Trajectory]:
    """Those of an episode, the first one first."""
    return [each for each in group.members if episode_of(each.name) == episode]


def let_go(groups: Iterable[Group]) -> None:
    """Members point back at their group: without this only the garbage collector could free them."""
    for group in groups:
        group.members = []


def still_running(group: Group) -> list[Trajectory]:
    return [member for member in group.members if member.state in ("running", "interrupted")]
