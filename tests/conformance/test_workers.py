"""What a rollout worker promises over every engine: the order of commands, and what is reported when."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.rollout.engine import Engine, Sampling
from staleflow.simulate.rollout import modelled_request
from staleflow.types import TOKEN, Command, Drop, Fence, PullWeights, Return, Submit, Work
from staleflow.workers.rollout import Requests, RolloutWorker
from tests.conformance.engines import Kind, SameWeights, count, modelled

Make = Callable[[], Engine]
TERMS, NUMBERS = (1, 2, 3), range(1, 6)
MOST = Sampling(max_tokens=40)


def new(engine: Engine, payload: bool, incarnation: int = 4) -> RolloutWorker:
    ask = Requests(MOST, seed=0) if payload else lambda each: replace(modelled_request(each), sampling=MOST)
    return RolloutWorker("i0", engine, SameWeights(), ask, incarnation)


def work(name: str, epoch: int = 1, prompt: int = 6) -> Work:
    return Work(name, epoch, name, prompt, (), TOKEN.type(5).tobytes() * prompt)


def applied(one: RolloutWorker) -> list[str]:
    return [name for name, _ in one.held()]


fences = st.builds(Fence, st.sampled_from(TERMS), st.sampled_from((3, 4)), st.sampled_from(NUMBERS))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(fences, max_size=40))
def test_commands_are_applied_in_order_without_gaps_once_and_none_of_an_earlier_term(heard: list[Fence]) -> None:
    """Each command submits a trajectory named after it; what is held says what was applied, in order."""
    one = new(modelled(Path()), payload=False)
    term, number, expected, came = 0, 0, list[str](), set[Fence]()
    for fence in heard:
        one.hear(Submit(fence, [work(f"{fence.term}.{fence.number}")]))
        if fence.incarnation == 4 and fence.term >= term:
            if fence.term > term:
                term, number = fence.term, 0
            came.add(fence)
            while Fence(term, 4, number + 1) in came:
                number += 1
                expected.append(f"{term}.{number}")
            assert one.applied == Fence(term, 4, number)
        assert applied(one) == expected
        kept = one._early  # pyright: ignore[reportPrivateUsage]
        assert all(each > one.applied for each in kept), "late and repeated commands would be kept without end"


def test_nothing_behind_a_pull_is_applied_before_it_was_made(make: Make, kind: Kind) -> None:
    one = new(make(), kind.payload)
    one.hear(PullWeights(Fence(1, 4, 1), 2))
    one.hear(Submit(Fence(1, 4, 2), [work("a")]))
    one.hear(PullWeights(Fence(1, 4, 3), 3))
    one.hear(Submit(Fence(1, 4, 4), [work("b")]))
    assert (one.pulling, applied(one), one.applied.number) == (2, [], 1)
    one.pull()
    assert (one.pulling, applied(one), one.applied.number) == (3, ["a"], 3)
    one.pull()
    assert (one.pulling, applied(one), one.applied.number) == (None, ["a", "b"], 4)
    report = one.report()
    assert report is not None
    assert (report.pulled, report.applied, report.state.version) == (3, Fence(1, 4, 4), 3)


def test_a_new_term_is_heard_while_a_pull_of_the_old_one_is_made(make: Make, kind: Kind) -> None:
    one = new(make(), kind.payload)
    one.hear(PullWeights(Fence(1, 4, 1), 2))
    one.hear(Submit(Fence(1, 4, 2), [work("old")]))
    one.hear(Submit(Fence(2, 4, 1), [work("new")]))
    one.pull()
    assert (applied(one), one.applied) == (["new"], Fence(2, 4, 1))


def test_the_report_of_a_pull_has_those_that_have_begun_and_were_never_reported(make: Make, kind: Kind) -> None:
    one = new(make(), kind.payload)
    resumed = Work("known", 1, "known", 6, ((0, 3),), TOKEN.type(5).tobytes() * 6, bytes(12), bytes(12))
    one.hear(Submit(Fence(1, 4, 1), [work("a"), work("b", prompt=90), resumed, work("c", prompt=90)]))
    while one.engine.peek("a", 0) is None and one.engine.busy:
        one.step()
    if one.report() is None and one.engine.peek("a", 0) is None:
        return  # one that only counts may have jumped over it
    one.hear(PullWeights(Fence(1, 4, 2), 1))
    one.pull()
    report = one.report()
    assert report is not None
    begun = {name for name, _ in one.held() if one.engine.peek(name, 0) is not None} - {"known"}
    assert {news.trajectory for news in report.progress} == begun
    assert all(news.spans[0][0] == 0 for news in report.progress)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data())
def test_every_token_is_reported_once_and_in_order_whatever_comes_between(data: st.DataObject) -> None:
    one, number, known = new(modelled(Path()), payload=False), 0, dict[str, int]()

    def send(command: Callable[[Fence], Command]) -> None:
        nonlocal number
        number += 1
        one.hear(command(Fence(1, 4, number)))
        while one.pulling is not None:
            one.pull()

    for at in range(data.draw(st.integers(1, 40))):
        names = one.held()
        match data.draw(st.sampled_from(["submit", "step", "step", "interrupt", "abort", "pull", "report", "stream"])):
            case "submit":
                name = f"t{at}"
                known[name] = 0
                send(lambda fence, name=name: Submit(fence, [work(name)]))
            case "step" if one.engine.busy:
                one.step()
            case "interrupt":
                send(lambda fence, names=names: Return(fence, names[:1]))
            case "abort":
                send(lambda fence, names=names: Drop(fence, names[:1]))
            case "pull":
                send(lambda fence, at=at: PullWeights(fence, at))
            case kind if (report := one.report(everything=kind == "stream")) is not None:
                news = (*report.progress, *report.finished, *report.returned)
                assert len({each.trajectory for each in news}) == len(news), "one thing of each"
                for each in news:
                    assert count(each.spans) >= known[each.trajectory]
                    known[each.trajectory] = count(each.spans)
                assert report.state.running + report.state.waiting <= len(one.held()) + 1
