"""The trajectory server: every prompt, group and trajectory of a run, and the ledger that admits them.

State changes only by events. A method here checks that something may happen, writes the event to the journal and
applies it; ``replay`` applies events that were written before. So the server after a crash is the server before it, up
to the last event that the journal kept.

The server decides nothing about *where* a trajectory runs: it holds what waits (``queue``), takes placements
(``place``), and refuses reports of an earlier epoch or of trajectories that are not live. Such a report is normal
after a delay or a crash; ``on_refused`` is called for it. A report about the right trajectory that cannot be true (a
token outside the vocabulary, a log-probability that is not a number, a version that does not exist) raises
``BadReportError``.

With ``payloads`` it also holds what the trajectories are made of; without (the simulator), only how long they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from typing import Any, Protocol

from staleflow.protocol import REDUNDANT, Ledger
from staleflow.servers.book import Book, group_name, still_running
from staleflow.servers.journal import Event, Journal
from staleflow.servers.lifecycle import Group, State, Trajectory
from staleflow.servers.payloads import BadReportError, Payloads
from staleflow.servers.state import to_state
from staleflow.types import Chunk, Row, Spans, Work, made_count, oldest, token_count

Kept = tuple[str, Chunk]
"""Payload that an event brings: of what, and the tokens."""
ON_AN_INSTANCE: tuple[State, ...] = ("running", "interrupted")
UNFINISHED: tuple[State, ...] = ("queued", *ON_AN_INSTANCE)


class Prompts(Protocol):
    """Where prompts come from."""

    def tokens(self, prompt: int) -> int | None:
        """Length of a prompt; None past the end of the data."""
        ...

    def ids(self, prompt: int) -> bytes:
        """Its token ids as little-endian int32; asked for only where payload is kept."""
        ...


class TrajectoryServer(Book):
    plays = False
    """Whether environments play the members."""

    def __init__(
        self,
        ledger: Ledger,
        group_size: int,
        extra_members: int,
        journal: Journal,
        payloads: Payloads | None = None,
    ) -> None:
        super().__init__(ledger, group_size, extra_members, payloads)
        if payloads is not None:
            payloads.limits.check(ledger.batch_size, group_size + extra_members)
        self.on_refused: Callable[[str, str], None] = lambda _name, _why: None
        """Called for every report that is refused, with the reason."""
        self.least_epoch = 1
        """Of placements from now on: those of an earlier term that were forgotten may have used later numbers."""
        self.beside: Callable[[], bytes] = lambda: b""
        """What else a snapshot of the journal holds: the state of somebody who can tell it from ``note``."""
        self.short_of_memory = False
        """Whether the next prompt waits until payload has been consumed."""
        self._journal = journal

    # Admission and placement

    def admit(self, prompts: Prompts) -> Group | None:
        """Draw the next prompt, owed ones first. None where the source ends, or while there is no memory for more."""
        prompt = self.owed[0] if self.owed else self.next_prompt
        prompt_tokens = prompts.tokens(prompt)
        if prompt_tokens is None:
            return None
        chunk = None
        if self.payloads is not None:
            members = self.group_size + self.extra_members
            # One step always fits, unless branches of episodes took more than anybody could know.
            few = len(self.groups) < self.ledger.batch_size
            self.short_of_memory = not few and not self.payloads.room_for(members, prompt_tokens)
            if self.short_of_memory:
                return None
            chunk = Chunk(0, self.payloads.checked_prompt(prompt, prompt_tokens, prompts.ids(prompt)))
        attempt = self.attempts.get(prompt, 0)
        name = group_name(prompt, attempt)
        self._record(self._admission(prompt, attempt, prompt_tokens), (name, chunk) if chunk else None)
        return self.groups[name]

    def _admission(self, prompt: int, attempt: int, prompt_tokens: int) -> Event:
        return "admit", prompt, attempt, prompt_tokens

    def queue(self, most: int) -> tuple[list[Trajectory], Iterable[Group]]:
        """What waits: members of reserved groups, oldest version first, and groups not reserved yet, in order."""

        def age(trajectory: Trajectory) -> tuple[int, int, int]:
            group = trajectory.group
            return group.version or 0, group.prompt, group.attempt

        resuming = nsmallest(most, self._resuming.values(), key=age) if self._resuming else []
        return resuming, self._fresh.values()

    @property
    def fresh(self) -> int:
        """Groups that are admitted and not reserved."""
        return len(self._fresh) + len(self._hidden)

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
            self._record(("reserve", group.name, version))
        elif version < group.version:
            if not self.ledger.lower(group.name, version):
                return None
            self._record(("lower", group.name, version))
        self._record(("route", name, instance, max(trajectory.epoch + 1, self.least_epoch)))
        return trajectory

    # What instances and reward workers report. The answer says whether it was new.

    def stream(self, name: str, epoch: int, spans: Spans, chunk: Chunk | None = None) -> bool:
        """Tokens so far, and those among them that are new. Keeps the longer of what is known and what is reported."""
        trajectory = self._current(name, epoch, ON_AN_INSTANCE)
        if trajectory is None or token_count(spans) <= trajectory.generated:
            return False
        news = self._checked(trajectory, spans, chunk)
        if news is None:
            return False
        self._record(("stream", name, spans), *news)
        return True

    def interrupt(self, name: str) -> bool:
        """The command to bring it back has been given."""
        trajectory = self.trajectories.get(name)
        if trajectory is None or trajectory.state != "running":
            return False
        self._record(("interrupt", name))
        return True

    def give_back(self, name: str, epoch: int, spans: Spans, chunk: Chunk | None = None) -> bool:
        """The instance returned it, or is gone: it waits here again."""
        if self._current(name, epoch, ON_AN_INSTANCE) is None:
            return False
        self.stream(name, epoch, spans, chunk)
        self._record(("requeue", name))
        return True

    def generated(self, name: str, epoch: int, spans: Spans, chunk: Chunk | None = None) -> bool:
        """The last token is there (or it was truncated): it can be scored."""
        trajectory = self._current(name, epoch, UNFINISHED)
        if trajectory is None or not epoch:
            return False
        news = self._checked(trajectory, spans, chunk)
        if news is None:
            self.give_back(name, epoch, trajectory.spans)
            return False
        self._record(("generated", name, spans), *news)
        return True

    def fault(self, name: str, epoch: int, why: str) -> Trajectory | None:
        """A report about it could not be true: it waits here again, with what was known before. The trajectory, if it
        had not been taken away from the reporter anyway."""
        trajectory = self._current(name, epoch, UNFINISHED)
        if trajectory is not None:
            self._record(("misreport", name, why))
        return trajectory

    def score(self, name: str, reward: float) -> tuple[Group, list[Trajectory]] | None:
        """The reward is known. If that completes the group: the group, and the surplus members that still run."""
        trajectory = self.trajectories.get(name)
        if trajectory is None or trajectory.state != "generated":
            return None
        self._record(("score", name, reward))
        group = trajectory.group
        return self.occupy(group) if group.scored >= group.needed else None

    def occupy(self, group: Group) -> tuple[Group, list[Trajectory]] | None:
        """Complete the group if enough members are scored: after a score, or where a crash came right after one."""
        if group.complete or group.scored < group.needed:
            return None
        running = still_running(group)
        self._record(("occupy", group.name))
        return group, running

    def renew(self, group: Group, version: int) -> None:
        """No token older than ``version`` is left in the group."""
        if group.version is not None and group.version < version:
            self._record(("renew", group.name, version))

    def release(self, group: Group, reason: str, again: bool = True) -> list[Trajectory]:
        """Give the group up; its prompt is owed if it is to be tried again. Returns members that may still run."""
        running = still_running(group)
        self._record(("release", group.name, reason, again))
        return running

    # Training

    def take(self) -> list[Group]:
        """Lease what can go to the open step now."""
        names = self.ledger.take()
        if names:
            self.leased += names
            self._record(("lease", tuple(names)), applied=True)
        return [self.groups[name] for name in names]

    def consume(self) -> tuple[list[Group], list[Trajectory]]:
        """Lease the rest of the open step. Returns it, and running members of the groups that had to be given up."""
        before = set(self.leased)
        batch = self.ledger.consume(rank=self._progress)
        self.leased = list(batch.groups)
        running = self._forget(batch.aborted, REDUNDANT)
        self._record(("consume", tuple(batch.groups), tuple(batch.aborted)), applied=True)
        return [self.groups[name] for name in batch.groups if name not in before], running

    def work(self, trajectory: Trajectory) -> Work:
        """What an instance needs to generate it, from the beginning or from where it is."""
        name, group, payloads = trajectory.name, trajectory.group, self.payloads
        work = name, trajectory.epoch, group.name, group.prompt_tokens, trajectory.spans
        if payloads is None:
            return Work(*work)
        prompt, _ = payloads.bytes_of(group.name)
        tokens, logprobs = payloads.bytes_of(name) if trajectory.generated else (b"", b"")
        return Work(*work, prompt, tokens, logprobs)

    def rows(self, groups: Iterable[Group]) -> list[Row]:
        """What the trainer needs of complete groups, on the server's own memory."""
        payloads = self.payloads
        if payloads is None:
            raise ValueError("this server keeps no payload: give it one to train on")
        return [
            Row(member.name, prompt, *payloads.bytes_of(member.name), member.spans, member.reward or 0.0)
            for group in groups
            for prompt, _ in (payloads.bytes_of(group.name),)
            for member in group.members
            if member.state == "complete"
        ]

    def commit(self, step: int) -> None:
        """The version that the step made is durable."""
        self.on_committing(step, [self.groups[name] for name in self.leased])
        self._record(("commit", step))
        self._journal.may_snapshot(lambda: to_state(self) | {"beside": self.beside()})

    def forget(self, version: int) -> None:
        """What the versions up to this one were made of is not needed any more."""
        if any(step < version for step in self.made):
            self._record(("forget", version))

    @property
    def made_bytes(self) -> int:
        """Of payload on disk that is kept so that steps can be made again."""
        return sum(step.bytes for step in self.made.values())

    def rollback(self, step: int) -> None:
        """The trainer lost the step: its groups are complete again."""
        self._record(("rollback", step))

    # Within

    def note(self, *event: Any) -> None:
        """Write down something that changes nothing here, for those who ask what happened."""
        self._journal.append(event)

    def _record(self, event: Event, kept: Kept | None = None, *, applied: bool = False) -> None:
        """Apply, then write: what cannot be applied is never written, and nothing outside has seen it yet."""
        if not applied:
            self._handlers[event[0]](*event[1:])
        if kept is not None and self.payloads is not None:
            self.payloads.add(*kept)
        dropped: Sequence[str] = ()
        if self._dropped:
            dropped, self._dropped = self._dropped, []
        self._journal.append(event, kept, dropped)
        if self._news:
            self._tell()

    def _checked(self, trajectory: Trajectory, spans: Spans, chunk: Chunk | None) -> tuple[Kept] | tuple[()] | None:
        """What a report brings of payload, if anything, after everything that can be checked about it was.

        None if tokens this old may not be in the group. They are older than its reservation if it was renewed while an
        instance that was taken for dead continued; then the ledger must allow it."""
        name, group, ledger = trajectory.name, trajectory.group, self.ledger
        lowest = min(spans)[0] if spans else 0
        if spans and spans[-1][0] > ledger.version and spans[-1][0] > (frontier := ledger.frontier):
            raise BadReportError(
                f"trajectory {name} has tokens of version {spans[-1][0]}, but the newest that can exist is {frontier}"
            )
        if trajectory.spans and not extends(trajectory.spans, spans):
            raise BadReportError(
                f"trajectory {name} reports the versions {spans}, which do not continue {trajectory.spans}"
            )
        given = 0
        if lowest < 0:  # an environment gave some of the tokens
            given, lowest = self._given(trajectory, spans), oldest(spans)
        news = None
        if self.payloads is not None:
            news = self.payloads.checked(name, trajectory.generated, token_count(spans), chunk, given)
        if spans and group.version is not None and lowest is not None and lowest < group.version:
            if not ledger.lower(group.name, lowest):
                return None
            self._record(("lower", group.name, lowest))
        return ((name, news),) if news is not None and news.tokens else ()

    def _given(self, trajectory: Trajectory, spans: Spans) -> int:
        """Tokens that were given: no instance may add to them."""
        known = trajectory.generated - made_count(trajectory.spans)
        if (given := token_count(spans) - made_count(spans)) != known:
            raise BadReportError(f"trajectory {trajectory.name} reports {given} given tokens, {known} were given")
        return given

    def _current(self, name: str, epoch: int, states: tuple[State, ...]) -> Trajectory | None:
        """The trajectory, if the report is about its present epoch."""
        trajectory = self.trajectories.get(name)
        if trajectory is None:
            self.on_refused(name, "no such trajectory is live")
        elif trajectory.epoch != epoch:
            self.on_refused(name, f"it is in epoch {trajectory.epoch}, the report is of epoch {epoch}")
        elif trajectory.state not in states:
            self.on_refused(name, f"it is {trajectory.state}")
        else:
            return trajectory
        return None


def extends(old: Spans, new: Spans) -> bool:
    """Whether ``new`` says the same of the tokens that ``old`` knows (there are some), and only then continues."""
    last = len(old) - 1
    return (
        len(new) > last and new[:last] == old[:last] and new[last][0] == old[last][0] and new[last][1] >= old[last][1]
    )
