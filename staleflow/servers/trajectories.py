"""The trajectory server: every prompt, group and trajectory of a run, and the ledger that admits them.

State changes only by events. A method here checks that something may happen, writes the event to the journal and
applies it; ``replay`` applies events that were written before. So the server after a crash is the server before it, up
to the last event that the journal kept.

The server decides nothing about *where* a trajectory runs: it holds what waits (``queue``), takes placements
(``place``), and refuses what comes from an earlier epoch or from nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from staleflow.protocol import REDUNDANT, StalenessLedger
from staleflow.servers.journal import Event, Journal
from staleflow.servers.lifecycle import Group, Spans, Trajectory


class TrajectoryServer:
    def __init__(self, ledger: StalenessLedger, group_size: int, extra_members: int, journal: Journal) -> None:
        self.ledger = ledger
        self.group_size = group_size
        self.extra_members = extra_members
        self.groups: dict[str, Group] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.owed: list[int] = []
        """Prompts whose groups were given up, to be drawn again before new ones."""
        self.leased: list[str] = []
        """Groups of the step that is being trained."""
        self.next_prompt = 0
        self.attempts: dict[int, int] = {}
        self.on_aborted: Callable[[Trajectory, str], None] = lambda _trajectory, _reason: None
        """Told of every trajectory that ends without being trained, and why."""
        self.on_committed: Callable[[int, list[Group]], None] = lambda _step, _groups: None
        self._journal = journal
        self._handlers: dict[str, Callable[..., None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }
        self._fresh: dict[str, Group] = {}
        self._resuming: dict[str, Trajectory] = {}
        """Queued members of groups that are reserved."""

    # Admission and placement

    def admit(self, tokens_of: Callable[[int], int | None]) -> Group | None:
        """Draw the next prompt, owed ones first. ``tokens_of`` knows its length; None where the source ends."""
        prompt = self.owed[0] if self.owed else self.next_prompt
        prompt_tokens = tokens_of(prompt)
        if prompt_tokens is None:
            return None
        attempt = self.attempts.get(prompt, 0)
        self._record("admit", prompt, attempt, prompt_tokens)
        return self.groups[group_name(prompt, attempt)]

    def queue(self, most: int) -> tuple[list[Trajectory], Iterable[Group]]:
        """What waits: members of reserved groups, oldest version first, and groups not reserved yet, in order."""

        def age(trajectory: Trajectory) -> tuple[int, int, int]:
            group = trajectory.group
            return group.version or 0, group.prompt, group.attempt

        return sorted(self._resuming.values(), key=age)[:most], self._fresh.values()

    @property
    def fresh(self) -> int:
        """Groups that are admitted and not reserved."""
        return len(self._fresh)

    @property
    def waiting(self) -> bool:
        """Whether any trajectory waits for an instance."""
        return bool(self._resuming or self._fresh)

    def place(self, name: str, instance: str, version: int) -> Trajectory | None:
        """Send a queued trajectory to an instance that holds ``version``. None, and no change, if that is refused."""
        trajectory = self.trajectories.get(name)
        if trajectory is None or trajectory.state != "queued":
            return None
        group = trajectory.group
        if group.version is None:
            if not self.ledger.can_reserve(version):
                return None
            self._record("reserve", group.name, version)
        elif version < group.version:
            if not self.ledger.lower(group.name, version):
                return None
            self._record("lower", group.name, version)
        self._record("route", name, instance, trajectory.epoch + 1)
        return trajectory

    # What instances and reward workers report. The answer tells whether it was news.

    def stream(self, name: str, epoch: int, spans: Spans) -> bool:
        """Tokens so far. Keeps the longer of what is known and what is reported."""
        trajectory = self._current(name, epoch, "running", "interrupted")
        if trajectory is None or tokens(spans) <= trajectory.generated or not self._within(trajectory.group, spans):
            return False
        self._record("stream", name, spans)
        return True

    def interrupt(self, name: str) -> bool:
        """The command to bring it back has been given."""
        trajectory = self.trajectories.get(name)
        if trajectory is None or trajectory.state != "running":
            return False
        self._record("interrupt", name)
        return True

    def give_back(self, name: str, epoch: int, spans: Spans) -> bool:
        """The instance returned it, or is gone: it waits here again."""
        if self._current(name, epoch, "running", "interrupted") is None:
            return False
        self.stream(name, epoch, spans)
        self._record("requeue", name)
        return True

    def generated(self, name: str, epoch: int, spans: Spans) -> bool:
        """The last token is there (or it was truncated): it can be scored."""
        trajectory = self._current(name, epoch, "queued", "running", "interrupted")
        if trajectory is None or not epoch:
            return False
        if not self._within(trajectory.group, spans):
            self.give_back(name, epoch, trajectory.spans)
            return False
        self._record("generated", name, spans)
        return True

    def score(self, name: str, reward: float) -> tuple[Group, list[Trajectory]] | None:
        """The reward is known. If that completes the group: the group, and the surplus members that still run."""
        trajectory = self.trajectories.get(name)
        if trajectory is None or trajectory.state != "generated":
            return None
        group = trajectory.group
        self._record("score", name, reward)
        if group.complete or group.scored < group.needed:
            return None
        running = still_running(group)
        self._record("occupy", group.name)
        return group, running

    def renew(self, group: Group, version: int) -> None:
        """No token older than ``version`` is left in the group."""
        if group.version is not None and group.version < version:
            self._record("renew", group.name, version)

    def release(self, group: Group, reason: str) -> list[Trajectory]:
        """Give the group up; its prompt is owed. Returns the members that may still run somewhere."""
        running = still_running(group)
        self._record("release", group.name, reason)
        return running

    # Training

    def take(self) -> list[Group]:
        """Lease what can go to the open step now."""
        names = self.ledger.take()
        if names:
            self._journal.append(("lease", tuple(names)))
            self.leased += names
        return [self.groups[name] for name in names]

    def consume(self) -> tuple[list[Group], list[Trajectory]]:
        """Lease the rest of the open step. Returns it, and running members of the groups that had to be given up."""
        before = set(self.leased)
        batch = self.ledger.consume(rank=self._progress)
        self._journal.append(("consume", tuple(batch.groups), tuple(batch.aborted)))
        self.leased = list(batch.groups)
        return [self.groups[name] for name in batch.groups if name not in before], self._forget(
            batch.aborted, REDUNDANT
        )

    def commit(self, step: int) -> None:
        """The version that the step made is durable."""
        self._record("commit", step)

    def rollback(self, step: int) -> None:
        """The trainer lost the step: its groups are complete again."""
        self._record("rollback", step)

    # Events

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events of an earlier life of this server."""
        for event in events:
            self._apply(event)

    def _record(self, *event: Any) -> None:
        """Apply, then write: what cannot be applied is never written, and nobody outside has been told yet."""
        self._apply(event)
        self._journal.append(event)

    def _apply(self, event: Event) -> None:
        self._handlers[event[0]](*event[1:])

    def _on_admit(self, prompt: int, attempt: int, prompt_tokens: int) -> None:
        if self.owed and self.owed[0] == prompt:
            self.owed.pop(0)
        else:
            self.next_prompt = prompt + 1
        self.attempts[prompt] = attempt + 1
        group = Group(group_name(prompt, attempt), prompt, attempt, prompt_tokens, self.group_size)
        group.members = [
            Trajectory(f"{group.name}/{member}", group) for member in range(self.group_size + self.extra_members)
        ]
        self.groups[group.name] = self._fresh[group.name] = group
        self.trajectories.update((member.name, member) for member in group.members)

    def _on_reserve(self, name: str, version: int) -> None:
        if not self.ledger.reserve(name, version):
            raise ValueError(f"group {name} cannot be reserved with version {version}: the ledger has no room")
        group = self._fresh.pop(name)
        group.version = version
        self._resuming.update((member.name, member) for member in group.members)

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

    def _on_generated(self, name: str, spans: Spans) -> None:
        trajectory = self.trajectories[name]
        trajectory.go("generated")
        trajectory.stamp(spans)
        trajectory.instance = None
        self._resuming.pop(name, None)

    def _on_score(self, name: str, reward: float) -> None:
        trajectory = self.trajectories[name]
        trajectory.go("scored")
        trajectory.reward = reward
        trajectory.group.scored += 1

    def _on_occupy(self, name: str) -> None:
        group = self.groups[name]
        self.ledger.occupy(name)
        group.complete = True
        for member in group.members:
            if member.state == "scored":
                member.go("complete")
            else:
                self._abort(member, "surplus")

    def _on_release(self, name: str, reason: str) -> None:
        if self.groups[name].version is not None:
            self.ledger.release(name, reason)
        self._forget([name], reason)

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
        for group in groups:
            self.attempts.pop(group.prompt, None)
            for member in group.members:
                del self.trajectories[member.name]
                if member.state == "complete":
                    member.go("consumed")
        self.leased = []
        self.on_committed(step, groups)
        for group in groups:
            group.members = []  # they point back: without this only the garbage collector could free them

    def _on_rollback(self, step: int) -> None:
        self.ledger.rollback(step)
        self.leased = []

    # Within

    def _forget(self, names: Iterable[str], reason: str) -> list[Trajectory]:
        """Drop groups that were given up and owe their prompts. Returns the members that may still run."""
        running: list[Trajectory] = []
        for name in names:
            group = self.groups.pop(name)
            self._fresh.pop(name, None)
            self.owed.append(group.prompt)
            running += still_running(group)
            for member in group.members:
                del self.trajectories[member.name]
                self._abort(member, reason)
            group.members = []
        return running

    def _within(self, group: Group, spans: Spans) -> bool:
        """Whether tokens this old may be in the group. They are older than its reservation if it was renewed while an
        instance that was taken for dead went on; then the ledger must allow it."""
        oldest = min((version for version, _ in spans), default=group.version)
        if group.version is None or oldest is None or oldest >= group.version:
            return True
        if not self.ledger.lower(group.name, oldest):
            return False
        self._record("lower", group.name, oldest)
        return True

    def _progress(self, name: str) -> float:
        """What is given up first where redundancy admitted too much: the group with the fewest scored members."""
        return self.groups[name].scored

    def _abort(self, member: Trajectory, reason: str) -> None:
        self._resuming.pop(member.name, None)
        if member.state != "aborted":
            member.go("aborted")
            self.on_aborted(member, reason)

    def _current(self, name: str, epoch: int, *states: str) -> Trajectory | None:
        """The trajectory, if the report is about its present life."""
        trajectory = self.trajectories.get(name)
        if trajectory is None or trajectory.epoch != epoch or trajectory.state not in states:
            return None
        return trajectory

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories.values())


def group_name(prompt: int, attempt: int) -> str:
    return f"p{prompt}" if attempt == 0 else f"p{prompt}.{attempt}"


def of_group(name: str) -> tuple[int, int]:
    """The prompt and the attempt that a group's name stands for."""
    prompt, _, attempt = name[1:].partition(".")
    return int(prompt), int(attempt or 0)


def still_running(group: Group) -> list[Trajectory]:
    return [member for member in group.members if member.state in ("running", "interrupted")]


def tokens(spans: Spans) -> int:
    return sum(count for _, count in spans)
