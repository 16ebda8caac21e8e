"""What every engine promises, whatever decodes: interrupt, resume, pull at a boundary, stamps, failures, snapshots."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from staleflow.rollout.engine import Engine, EngineError, Request, Result
from staleflow.types import Spans
from tests.conformance.engines import (
    KV_TOKENS,
    MAX_RUNNING,
    Kind,
    SameWeights,
    count,
    drained,
    greedy,
    made,
    modelled,
    request,
    resumed,
)

Make = Callable[[], Engine]


def test_a_request_is_made_to_its_limit_and_stamped_with_the_version(make: Make, kind: Kind) -> None:
    engine = make()
    assert not engine.busy
    engine.submit([request("a", most=12), request("b", most=1)])
    found = drained(engine)
    assert {name: result.spans for name, result in found.items()} == {"a": ((0, 12),), "b": ((0, 1),)}
    assert {result.reason for result in found.values()} == {"length"}
    for result in found.values():
        assert len(result.tokens) == len(result.logprobs) == (count(result.spans) if kind.payload else 0)
    assert engine.snapshot().kv_free == engine.snapshot().kv_total == KV_TOKENS


def test_steps_count_what_was_drawn_and_what_was_prefilled(make: Make) -> None:
    engine = make()
    engine.submit([request(name, prompt, most=10) for name, prompt in (("a", 5), ("b", 40))])
    drawn = prefilled = 0
    while engine.busy:
        output = engine.step()
        drawn += output.made
        prefilled += output.prefilled
    assert (drawn, prefilled) == (20, 45)


def test_what_is_here_can_be_looked_at_from_any_token_on(make: Make, kind: Kind) -> None:
    engine = make()
    engine.submit([request("a", most=20), request("b", most=5), request("c", most=9)])
    assert engine.peek("a", 0) is None
    assert engine.peek("nobody", 0) is None
    looks, seen, known = 0, list[int](), 0
    ended: dict[str, Result] = {}
    while engine.busy:
        ended |= {result.name: result for result in engine.step().finished}
        if (part := engine.peek("a", known)) is not None:
            assert part.spans == ((0, made(engine, "a")),)
            assert len(part.tokens) == len(part.logprobs) == (count(part.spans) - known if kind.payload else 0)
            looks, seen, known = looks + 1, seen + part.tokens, count(part.spans)
            assert engine.peek("a", known) is None
    assert looks > 1
    assert ended["a"].tokens[: len(seen)] == seen


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_an_interrupted_request_continues_elsewhere_as_if_nothing_had_happened(
    make: Make, kind: Kind, steps: int
) -> None:
    alone, first, second = make(), make(), make()
    asked = request("a", most=24) if kind.repeatable else greedy(request("a", most=24))
    alone.submit([asked])
    first.submit([asked])
    for _ in range(steps):
        first.step()
    if not first.busy:
        return  # one that only counts may be done by then
    first.interrupt(["a", "nobody"])
    (back,) = first.step().returned
    assert (back.name, back.epoch, back.reason) == ("a", 1, "interrupted")
    assert not first.busy
    second.submit([resumed(asked, back)])
    (whole,) = drained(second).values()
    expected = drained(alone)["a"]
    assert (whole.epoch, whole.spans) == (2, expected.spans)
    if kind.payload:
        assert whole.tokens == expected.tokens
        assert whole.logprobs[: len(back.logprobs)] == back.logprobs
        assert whole.logprobs == pytest.approx(expected.logprobs, abs=kind.rounding)


def test_a_pull_stamps_what_was_made_before_and_loses_no_request(make: Make) -> None:
    engine = make()
    lengths = {f"r{at}": 10 + 5 * at for at in range(MAX_RUNNING + 2)}
    engine.submit([request(name, most=most) for name, most in lengths.items()])
    ended: dict[str, Result] = {}
    while "r0" not in ended:
        ended |= {result.name: result for result in engine.step().finished}
    before = {name: made(engine, name) for name in lengths}
    assert engine.pull(SameWeights(ahead=2), 1) == 3
    assert engine.snapshot().version == 3
    for name, result in drained(engine).items():
        old = ((0, before[name]),) if before[name] else ()
        assert result.spans == (*old, (3, lengths[name] - before[name]))
        ended[name] = result
    assert ended.keys() == lengths.keys()
    assert any(before.values())


def test_who_waits_for_prefill_only_is_not_said_to_wait(make: Make, kind: Kind) -> None:
    """Waiting is for memory or a row: an instance that only has to prefill is not too full."""
    engine = make()
    engine.submit([request(f"t{at}", prompt=40) for at in range(MAX_RUNNING + 2)])
    if not kind.payload:
        engine.step()  # where time is modelled, a command is heard at the end of a step
    now = engine.snapshot()
    assert (now.running, now.waiting) == (MAX_RUNNING, 2)
    assert min(now.context, now.kv_used) >= 40 * MAX_RUNNING
    assert len(drained(engine)) == MAX_RUNNING + 2


def test_who_waits_for_memory_is_said_to_wait(make: Make, kind: Kind) -> None:
    engine = make()
    engine.submit([request(name, prompt=120) for name in ("a", "b", "c")])
    if not kind.payload:
        engine.step()
    now = engine.snapshot()
    assert (now.running, now.waiting) == (2, 1)
    assert len(drained(engine)) == 3


def test_a_pull_of_the_version_that_is_there_changes_nothing(make: Make) -> None:
    engine = make()
    engine.submit([request("a")])
    engine.step()
    before = engine.snapshot()
    assert engine.pull(SameWeights(), 0) == 0
    assert engine.snapshot() == before
    assert drained(engine)["a"].spans == ((0, 30),)


def test_weights_that_are_too_old_are_refused_in_one_line(make: Make) -> None:
    with pytest.raises(EngineError, match="asked for version 3 of the weights and got 2: push it before the pull"):
        make().pull(lambda _: 2, 3)


def test_a_bad_request_fails_by_name_and_harms_no_other(make: Make) -> None:
    engine = make()
    good = request("good")
    spent = resumed(good, Result("spent", 1, "length", [], [], ((0, 30),), 0))
    wrong = Request("wrong", 1, [2, 3], [4], [-1.0], ((0, 3),))
    empty = Request("empty", 1, [])
    engine.submit([good, good, empty, Request("spent", *_fields(spent)), wrong])
    failed = {each.name: each.message for each in engine.step().failed}
    assert failed.keys() == {"good", "empty", "spent", "wrong"}
    assert all("\n" not in message for message in failed.values())
    assert "already here" in failed["good"]
    assert drained(engine)["good"].spans == ((0, 30),)


def _fields(one: Request) -> tuple:
    return one.epoch, one.prompt, one.tokens, one.logprobs, one.spans, one.group, one.sampling


def test_a_dropped_request_is_never_reported_and_its_name_is_free(make: Make) -> None:
    engine = make()
    engine.submit([request("a"), request("b", most=3)])
    engine.abort(["a", "a", "nobody"])
    engine.submit([request("a", most=7, epoch=5)])
    found = drained(engine)
    assert {name: (result.epoch, result.spans) for name, result in found.items()} == {
        "a": (5, ((0, 7),)),
        "b": (1, ((0, 3),)),
    }


def test_a_returned_request_can_be_sent_again_before_it_was_reported(make: Make) -> None:
    engine = make()
    engine.submit([request("a")])
    engine.step()
    engine.interrupt(["a"])
    engine.submit([request("a", most=4, epoch=2)])
    output = engine.step()
    assert [(back.name, back.epoch) for back in output.returned] == [("a", 1)]
    assert not output.failed
    ended = {result.epoch for result in output.finished} | {result.epoch for result in drained(engine).values()}
    assert ended == {2}


def test_close_is_repeatable_and_then_nothing_is_stepped(make: Make) -> None:
    engine = make()
    engine.submit([request("a")])
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.step()


class Walk(RuleBasedStateMachine):
    """Everything that can be done to two engines, against an oracle: the versions of every token ever made."""

    @staticmethod
    def make() -> Engine:
        """An engine under test: the modelled one, unless a subclass says otherwise."""
        return modelled(Path())

    def __init__(self) -> None:
        super().__init__()
        self.engines = [type(self).make() for _ in range(2)]
        self.versions = [0, 0]
        self.asked: dict[str, Request] = {}
        self.where: dict[str, int] = {}
        self.spans: dict[str, Spans] = {}
        self.waiting: dict[str, Result] = {}
        self.ended: set[str] = set()

    def look(self, at: int) -> None:
        """Tokens that are new since the last look have the present version."""
        for name in [name for name, where in self.where.items() if where == at]:
            part = self.engines[at].peek(name, 0)
            self.stamp(name, at, () if part is None else part.spans)

    def stamp(self, name: str, at: int, spans: Spans) -> None:
        before = self.spans[name]
        if (fresh := count(spans) - count(before)) > 0:
            if before and before[-1][0] == self.versions[at]:
                before, fresh = before[:-1], fresh + before[-1][1]
            before = (*before, (self.versions[at], fresh))
        if spans:
            assert spans == before
        self.spans[name] = before

    @precondition(lambda self: len(self.asked) < 12)
    @rule(at=st.integers(0, 1), prompt=st.integers(1, 40), most=st.integers(1, 40), grouped=st.booleans())
    def submit(self, at: int, prompt: int, most: int, grouped: bool) -> None:
        name = f"t{len(self.asked)}"
        one = self.asked[name] = request(name, prompt, most, f"g{prompt}" if grouped else None)
        self.where[name], self.spans[name] = at, ()
        self.engines[at].submit([one])

    @precondition(lambda self: self.waiting)
    @rule(at=st.integers(0, 1))
    def resume(self, at: int) -> None:
        name, result = self.waiting.popitem()
        self.where[name] = at
        self.engines[at].submit([resumed(self.asked[name], result, result.epoch + 1)])

    @rule(at=st.integers(0, 1))
    def step(self, at: int) -> None:
        output = self.engines[at].step()
        assert not output.failed
        for result in (*output.finished, *output.returned):
            assert self.where.pop(result.name) == at
            self.stamp(result.name, at, result.spans)
            assert result.spans == self.spans[result.name]
            assert count(result.spans) <= self.asked[result.name].sampling.max_tokens
        self.waiting |= {result.name: result for result in output.returned}
        for result in output.finished:
            assert count(result.spans) == self.asked[result.name].sampling.max_tokens
            self.ended.add(result.name)
        self.look(at)

    @precondition(lambda self: self.where)
    @rule(which=st.integers(0, 20), at=st.integers(0, 1))
    def interrupt(self, which: int, at: int) -> None:
        name = list(self.where)[which % len(self.where)]
        self.look(at)
        self.engines[at].interrupt([name])
        if self.where[name] == at:
            self.step(at)
            assert name in self.waiting or name in self.ended

    @precondition(lambda self: self.where)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        name = list(self.where)[which % len(self.where)]
        self.engines[self.where.pop(name)].abort([name])
        self.ended.add(name)

    @rule(at=st.integers(0, 1), ahead=st.integers(0, 2))
    def pull(self, at: int, ahead: int) -> None:
        self.look(at)
        newest = max(self.versions)
        self.versions[at] = self.engines[at].pull(SameWeights(ahead), newest)
        assert self.versions[at] == newest + ahead
        self.look(at)

    @invariant()
    def snapshots_show_what_is_held(self) -> None:
        for at, engine in enumerate(self.engines):
            here = [name for name, where in self.where.items() if where == at]
            now = engine.snapshot()
            assert now.version == self.versions[at]
            assert now.running + now.waiting == len(here)
            assert now.running <= now.max_running == MAX_RUNNING
            assert 0 <= now.kv_free <= now.kv_total == KV_TOKENS
            assert engine.busy or not here
            if not here:
                assert (now.context, now.kv_used) == (0, 0)
            elif not now.waiting:
                assert now.context == sum(len(self.asked[name].prompt) + made(engine, name) for name in here)

    def teardown(self) -> None:
        for at, engine in enumerate(self.engines):
            while engine.busy:
                self.step(at)
            engine.close()


def test_a_random_walk_agrees_with_the_oracle(make: Make) -> None:
    chosen = type("Chosen", (Walk,), {"make": staticmethod(make)})
    run_state_machine_as_test(
        chosen, settings=settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)
    )
