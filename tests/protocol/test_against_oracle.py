"""Ledger and brute-force oracle, driven side by side through every operation in any order."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from staleflow.protocol import LedgerError, StalenessLedger
from tests.protocol.compare import check
from tests.protocol.oracle import Oracle

choice = st.integers(0, 10**6)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(batch=st.integers(1, 3), staleness=st.integers(0, 3), redundancy=st.integers(0, 2))
    def start(self, batch: int, staleness: int, redundancy: int) -> None:
        self.ledger = StalenessLedger(batch, staleness, redundancy)
        self.oracle = Oracle(batch, staleness, redundancy)
        self.names = 0
        check(self.ledger, self.oracle)

    def pick(self, number: int, *states: str) -> str | None:
        names = self.oracle.named(*states)
        return names[number % len(names)] if names else None

    def pick_version(self, number: int) -> int:
        """Mostly versions that could be granted; now and then one that is far too old."""
        window = self.oracle.max_staleness + 2
        return max(0, self.oracle.version - number % window)

    @rule(back=choice, many=st.integers(1, 4))
    def reserve(self, back: int, many: int) -> None:
        for _ in range(many):
            version = self.pick_version(back)
            self.names += 1
            name = f"g{self.names}"
            assert self.ledger.reserve(name, version) == self.oracle.reserve(name, version)
        check(self.ledger, self.oracle)

    @rule(number=choice, back=choice)
    def lower(self, number: int, back: int) -> None:
        if name := self.pick(number, "in flight"):
            version = self.pick_version(back)
            assert self.ledger.lower(name, version) == self.oracle.lower(name, version)
            check(self.ledger, self.oracle)

    @rule(number=choice, back=choice)
    def renew(self, number: int, back: int) -> None:
        if name := self.pick(number, "in flight"):
            version = self.pick_version(back)
            if version >= self.oracle.groups[name].version:
                self.ledger.renew(name, version)
                self.oracle.renew(name, version)
            else:
                with pytest.raises(LedgerError):
                    self.ledger.renew(name, version)
            check(self.ledger, self.oracle)

    @rule(number=choice, many=st.integers(1, 4))
    def occupy(self, number: int, many: int) -> None:
        for _ in range(many):
            if name := self.pick(number, "in flight"):
                self.ledger.occupy(name)
                self.oracle.occupy(name)
        check(self.ledger, self.oracle)

    @rule(number=choice, reason=st.sampled_from(["filtered", "failed"]))
    def release(self, number: int, reason: str) -> None:
        if name := self.pick(number, "in flight", "complete"):
            self.ledger.release(name, reason)
            self.oracle.release(name, reason)
            check(self.ledger, self.oracle)

    @rule(limit=st.none() | st.integers(0, 3))
    def take(self, limit: int | None) -> None:
        assert self.ledger.take(limit) == self.oracle.take(limit)
        check(self.ledger, self.oracle)

    @rule(salt=st.none() | st.integers(0, 5))
    def consume(self, salt: int | None) -> None:
        def rank(name: str) -> int:
            return (int(name[1:]) * 7 + (salt or 0)) % 5 if salt is not None else 0

        if not self.oracle.ready():
            with pytest.raises(LedgerError):
                self.ledger.consume()
        else:
            step = self.oracle.frontier
            groups, aborted = self.oracle.consume(rank)
            batch = self.ledger.consume(rank if salt is not None else None)
            assert (batch.step, batch.groups, set(batch.aborted)) == (step, groups, aborted)
            assert len(batch.groups) == self.oracle.batch_size
            assert len(batch.aborted) == len(aborted) <= self.oracle.redundancy
        check(self.ledger, self.oracle)

    @precondition(lambda self: self.oracle.full)
    @rule()
    def commit(self) -> None:
        for name in self.oracle.leased:
            assert 0 <= self.oracle.version - self.oracle.groups[name].version <= self.oracle.max_staleness
        self.ledger.commit(self.oracle.version)
        self.oracle.commit()
        check(self.ledger, self.oracle)

    @rule()
    def rollback(self) -> None:
        if self.oracle.leased:
            self.ledger.rollback(self.oracle.version)
            self.oracle.rollback()
        else:
            with pytest.raises(LedgerError):
                self.ledger.rollback(self.oracle.version)
        check(self.ledger, self.oracle)

    @rule()
    def save_and_restore(self) -> None:
        self.ledger = StalenessLedger.from_state(json.loads(json.dumps(self.ledger.to_state())))
        check(self.ledger, self.oracle)

    @rule()
    def finish_and_train(self) -> None:
        """From any state, once everything in flight has finished, the open step can be trained."""
        if self.oracle.full:
            return self.commit()
        for name in self.oracle.named("in flight"):
            self.ledger.occupy(name)
            self.oracle.occupy(name)
        while not self.ledger.ready():
            self.names += 1
            name = f"g{self.names}"
            assert self.ledger.reserve(name, self.ledger.version), "neither ready nor room: a hang"
            assert self.oracle.reserve(name, self.oracle.version)
            self.ledger.occupy(name)
            self.oracle.occupy(name)
        self.consume(None)
        self.commit()


LedgerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestLedgerAgainstOracle = LedgerMachine.TestCase
