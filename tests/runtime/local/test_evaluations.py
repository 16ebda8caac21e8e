"""Every evaluation that is asked for is answered or reported as missing, whatever becomes of the evaluators."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from staleflow.runtime.local.evaluations import TRIES, Evaluations


@given(st.lists(st.sampled_from(["ask", "keep", "answer", "die", "end"]), max_size=40))
def test_each_is_answered_or_missing_once_and_asked_again_of_a_successor(happens: list[str]) -> None:
    sent: list[bool] = []
    missing: list[int] = []
    evaluations = Evaluations(sent.append, lambda version, _why: missing.append(version))
    asked: set[int] = set()
    answered: set[int] = set()
    gone = False
    for version, what in enumerate(happens):
        if what in ("ask", "keep"):
            asked.add(version)
            evaluations.ask(version, now=what == "ask")
        elif what == "answer" and not gone:
            answered |= {each for each in asked if each not in missing}
            evaluations.answered(version)
        elif what == "die" and not gone:
            evaluations.died()
            before = len(sent)
            evaluations.back()
            assert (len(sent) > before) == evaluations.open
        elif what == "end":
            gone = True
            evaluations.end("it dies too often")
        assert len(missing) == len(set(missing))
        assert evaluations.open == bool(asked - answered - set(missing))
        assert not (gone and evaluations.open)


def test_an_evaluation_that_kills_every_evaluator_is_given_up() -> None:
    missing: list[int] = []
    evaluations = Evaluations(lambda _: None, lambda version, _why: missing.append(version))
    evaluations.ask(7)
    for _ in range(TRIES):
        assert missing == []
        evaluations.died()
        evaluations.back()
    assert missing == [7]
    asyncio.run(evaluations.settled(7))
