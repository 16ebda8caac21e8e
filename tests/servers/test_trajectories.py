"""The trajectory server under everything that instances, rewards and trainer may report, in any order."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from staleflow.protocol import LedgerError, StalenessLedger
from staleflow.servers.lifecycle import TRAINED, Group, Trajectory
from staleflow.types import Spans
from tests.servers.small_server import ALL, Source, empty_server, run_to_score, state_of

choice = st.sampled_from(range(4096))
Answer = TypeVar("Answer")
PROMPTS = 60


def _trained(groups: list[Group]) -> dict[str, list[str]]:
    return {group.name: [each.name for each in group.members if each.state in TRAINED] for group in groups}


class ServerMachine(RuleBasedStateMachine):
    @initialize(
        batch=st.integers(1, 3),
        staleness=st.integers(0, 2),
        redundancy=st.integers(0, 1),
        size=st.integers(1, 2),
        extra=st.integers(0, 1),
    )
    def start(self, **shape: int) -> None:
        self.shape = shape
        self.server, self.journal = empty_server(**shape)
        self.ledger = self.server.ledger
        self.admissions: list[str] = []
        self.committed: Counter[int] = Counter()
        self.gone: list[str] = ["nobody/0"]
        self.announced: tuple[int, int, dict[str, list[str]]] | None = None
        self.server.on_committing = self.note_committing
        self.server.on_committed = self.note_commit
        self.server.on_aborted = lambda one, _: self.gone.append(one.name)

    def note_committing(self, step: int, groups: list[Group]) -> None:
        """A kill just after a commit was durable left a step without its line: what is written here comes before."""
        self.announced = step, self.journal.position, _trained(groups)

    def note_commit(self, step: int, groups: list[Group]) -> None:
        assert self.announced == (step, self.journal.position - 1, _trained(groups))
        assert len(groups) == self.ledger.batch_size
        for group in groups:
            assert group.version is not None
            assert step - group.version <= self.ledger.max_staleness
            consumed = [member for member in group.members if member.state == "consumed"]
            assert len(consumed) == group.needed
            assert all(member.state in ("consumed", "aborted") for member in group.members)
            self.committed[group.prompt] += 1
            self.gone += [member.name for member in group.members]

    def pick(self, number: int, *states: str) -> str:
        """Mostly a trajectory in one of these states; now and then any other, or one that is gone."""
        fitting = [one.name for one in self.server if one.state in states]
        pools = (self.gone, list(self.server.trajectories), fitting, fitting, fitting, fitting)
        pool = pools[number % len(pools)] or self.gone
        return pool[number // len(pools) % len(pool)]

    def version(self, back: int) -> int:
        return max(0, self.ledger.version - back % (self.ledger.max_staleness + 2))

    def unless_news(self, call: Callable[[], Answer]) -> Answer:
        """Whatever the server says was no news must leave no trace, and news must be written down."""
        before, count = state_of(self.server), self.journal.position
        answer = call()
        assert (self.journal.position > count) == bool(answer)
        assert answer or state_of(self.server) == before
        return answer

    # Admission and placement

    @rule(many=st.integers(1, 4))
    def admit(self, many: int) -> None:
        for _ in range(many):
            owed, following = list(self.server.owed), self.server.next_prompt
            group = self.unless_news(lambda: self.server.admit(Source(PROMPTS, first=10)))
            if group is None:
                assert not owed
                assert following == PROMPTS
                continue
            assert group.prompt == (owed[0] if owed else following), "owed prompts come first"
            assert group.name not in self.admissions, "a prompt that comes again has a new name"
            self.admissions.append(group.name)

    @rule(number=choice, back=choice, instance=st.sampled_from(["i0", "i1"]))
    def place(self, number: int, back: int, instance: str) -> None:
        name, version = self.pick(number, "queued"), self.version(back)
        one = self.server.trajectories.get(name)
        allowed, was = self.allowed(one, version), one.epoch if one else 0
        placed = self.unless_news(lambda: self.server.place(name, instance, version))
        assert (placed is not None) == allowed
        if placed is not None and placed.group.version is not None:
            assert (placed.state, placed.epoch, placed.instance) == ("running", was + 1, instance)
            assert placed.group.version <= version

    def allowed(self, one: Trajectory | None, version: int) -> bool:
        """Whether the placement is one that the ledger would grant, asked of a copy."""
        if one is None or one.state != "queued":
            return False
        copy = StalenessLedger.from_state(self.ledger.to_state())
        if one.group.version is None:
            return copy.reserve("copy", version)
        return version >= one.group.version or copy.lower(one.group.name, version)

    # Reports

    @rule(
        number=choice,
        kind=st.sampled_from(["stream", "give_back", "generated"]),
        off=st.sampled_from([0, 0, 0, 0, -1, 1]),
        count=st.integers(0, 9),
    )
    def report(self, number: int, kind: str, off: int, count: int) -> None:
        name = self.pick(number, "running", "interrupted")
        one = self.server.trajectories.get(name)
        epoch = max(1, (one.epoch if one else 1) + off)
        spans: Spans = one.spans if one else ()
        if count:
            spans = (*spans, (self.ledger.version, count))
        states = ("queued", "running", "interrupted")[kind != "generated" :]
        current = one if one and one.epoch == epoch and one.state in states else None
        news = current is not None and (kind != "stream" or count > 0)
        call = getattr(self.server, kind)
        assert self.unless_news(lambda: call(name, epoch, spans)) == news
        if current and news:
            assert current.spans == spans
            assert not self.unless_news(lambda: call(name, epoch, spans)), "a repeated report changes nothing"

    @rule(number=choice)
    def interrupt(self, number: int) -> None:
        name = self.pick(number, "running")
        one = self.server.trajectories.get(name)
        running = one is not None and one.state == "running"
        assert self.unless_news(lambda: self.server.interrupt(name)) == running

    @rule(number=choice, reward=st.sampled_from([0.0, 1.0]))
    def score(self, number: int, reward: float) -> None:
        name = self.pick(number, "generated")
        one = self.server.trajectories.get(name)
        if one is None or one.state != "generated":
            assert self.unless_news(lambda: self.server.score(name, reward)) is None
            return
        group, last = one.group, one.group.scored + 1 == one.group.needed
        running = [member for member in group.members if member.state in ("running", "interrupted")]
        assert self.server.score(name, reward) == ((group, running) if last else None)
        if last:
            assert Counter(member.state for member in group.members)["complete"] == group.needed
            assert all(member.state in ("complete", "aborted") for member in group.members)
        assert self.unless_news(lambda: self.server.score(name, reward)) is None

    @rule(number=choice, back=choice)
    def renew(self, number: int, back: int) -> None:
        one = self.server.trajectories.get(self.pick(number, "running"))
        if one and not one.group.begun and not one.group.complete:
            version, was = self.version(back), one.group.version
            self.server.renew(one.group, version)
            assert one.group.version == (was if was is None else max(was, version))

    @rule(number=choice, reason=st.sampled_from(["no signal", "reward timed out"]))
    def release(self, number: int, reason: str) -> None:
        one = self.server.trajectories.get(self.pick(number, "queued", "running", "complete"))
        if one and one.group.name not in self.server.leased:
            group, members = one.group, list(one.group.members)
            running = [member for member in members if member.state in ("running", "interrupted")]
            assert self.server.release(group, reason) == running
            assert self.server.owed[-1] == group.prompt
            assert {member.state for member in members} == {"aborted"}

    # Training

    @rule()
    def take(self) -> None:
        leased = list(self.server.leased)
        groups = self.unless_news(self.server.take)
        assert self.server.leased == leased + [group.name for group in groups]

    @rule()
    def consume(self) -> None:
        if not self.ledger.ready():
            with pytest.raises(LedgerError):
                self.unless_news(self.server.consume)
            return
        leased, step = set(self.server.leased), self.ledger.frontier
        groups, running = self.server.consume()
        assert leased | {group.name for group in groups} == set(self.server.leased)
        assert self.ledger.frontier == step + 1
        assert all(one.state == "aborted" for one in running)

    @precondition(lambda self: self.ledger.frontier > self.ledger.version)
    @rule()
    def commit(self) -> None:
        self.server.commit(self.ledger.version)

    @precondition(lambda self: self.ledger.taken)
    @rule()
    def rollback(self) -> None:
        leased = [self.server.groups[name] for name in self.server.leased]
        self.server.rollback(self.ledger.version)
        assert self.server.leased == []
        assert all(group.complete for group in leased)

    @rule(many=st.integers(1, 4), train=st.booleans())
    def finish_some(self, many: int, train: bool) -> None:
        """Bring whole groups to their end, so that steps are trained now and then."""
        self.admit(many)
        for group in list(self.server.groups.values())[:many]:
            for one in list(group.members):
                if one.state == "queued" and not group.complete:
                    run_to_score(self.server, one, self.ledger.version)
        if train and self.ledger.ready():
            self.consume()
            self.commit()

    # What holds after each of them

    @invariant()
    def replay_gives_the_same_server(self) -> None:
        again, unwritten = empty_server(**self.shape)
        again.replay(self.journal.events)
        assert unwritten.position == 0, "a replay writes nothing"
        assert state_of(again) == state_of(self.server)

    @invariant()
    def no_prompt_is_lost_or_drawn_twice(self) -> None:
        found = Counter(group.prompt for group in self.server.groups.values())
        found.update(self.server.owed)
        found.update(self.committed)
        assert found == Counter(range(self.server.next_prompt))

    @invariant()
    def ledger_and_server_know_the_same_groups(self) -> None:
        held = {name: (version, state) for name, version, state in self.ledger.to_state()["groups"]}
        for group in self.server.groups.values():
            assert (group.name in held) == (group.version is not None)
            if group.version is not None:
                state = "leased" if group.name in self.server.leased else "complete" if group.complete else "in flight"
                assert held.pop(group.name) == (group.version, state)
        assert not held

    @invariant()
    def the_queue_holds_what_waits_oldest_first_and_then_fresh(self) -> None:
        resuming, fresh = self.server.queue(ALL)
        versions: list[Any] = [one.group.version for one in resuming]
        assert versions == sorted(versions)
        waiting = {one.name for one in self.server if one.state == "queued"}
        names = [group.name for group in fresh]
        assert names == [name for name in self.admissions if name in names], "in the order of admission"
        queued = [one.name for one in resuming] + [one.name for group in fresh for one in group.members]
        assert len(queued) == len(set(queued))
        assert set(queued) == waiting
        assert self.server.queue(1)[0] == resuming[:1]


ServerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
TestServerUnderAnyReports = ServerMachine.TestCase
