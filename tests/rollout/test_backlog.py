"""What an instance says of those who wait: for their prefill, which is work, or for memory, which is thrashing."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from staleflow.rollout.engine import Request
from staleflow.rollout.pages import PagePool
from staleflow.rollout.rows import Rows
from staleflow.rollout.scheduler import Scheduler
from staleflow.rollout.sequence import Sequence
from tests.rollout.conftest import Tiny, greedy, prompt

PAGE = 4


def waiting_in(lengths: list[int], pages: int, rows: int, budget: int, group: str | None = None) -> Scheduler:
    scheduler = Scheduler(PagePool(pages * PAGE, PAGE), Rows(rows, pages), budget)
    same = prompt(max(lengths, default=1))
    for at, length in enumerate(lengths):
        tokens = prompt(length, at) if group is None else same
        scheduler.waiting.append(Sequence(Request(f"t{at}", 1, tokens, group=group)))
    return scheduler


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(1, 400), st.integers(1, 8), st.integers(1, 12))
def test_those_who_join_are_those_whom_an_unlimited_prefill_would_admit(
    lengths: list[int], pages: int, rows: int, budget: int
) -> None:
    told = waiting_in(lengths, pages, rows, budget).backlog()
    at_once = waiting_in(lengths, pages, rows, budget=1_000)
    at_once.plan()
    assert (told.joining, told.stuck) == (len(at_once.running), len(at_once.waiting))
    assert told.tokens == sum(len(each.tokens) for each in at_once.running.values())
    assert told.pages == at_once.pool.used


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 9))
def test_it_says_the_same_however_far_prefill_is(lengths: list[int], budget: int, plans: int) -> None:
    scheduler = waiting_in(lengths, 400, len(lengths), budget)
    for _ in range(plans):
        plan = scheduler.plan()
        plan.decode, plan.order = [], plan.order[:0]  # nothing grows
        scheduler.computed(plan)
    told = scheduler.backlog()
    assert len(scheduler.running) + told.joining == len(lengths)
    assert scheduler.pool.used + told.pages == sum(map(scheduler.pool.pages_for, lengths))


def test_members_of_a_group_need_the_pages_of_its_prompt_once() -> None:
    scheduler = waiting_in([41] * 8, 10 + 8, 8, budget=8, group="g")
    assert scheduler.backlog() == (8, 8 * 41, 10 + 8, 0)
    scheduler.plan()  # the first of them holds the prompt; the others wait for it
    assert scheduler.backlog() == (7, 7 * 41, 7, 0)


def test_waiting_for_the_prefill_budget_is_not_thrashing(tiny: Callable[..., Tiny]) -> None:
    engine = tiny("llama").engine(prefill_tokens=8)
    engine.submit([Request(f"t{at}", 1, prompt(20, at), sampling=greedy(4)) for at in range(8)])
    engine.step()
    now = engine.snapshot()
    assert (now.running, now.waiting, now.context) == (8, 0, 8 * 20)
    assert now.kv_used == 8 * 24


def test_a_pull_that_recomputes_is_not_thrashing(tiny: Callable[..., Tiny]) -> None:
    engine = tiny("llama").engine(prefill_tokens=8)
    engine.submit([Request(f"t{at}", 1, prompt(20, at), sampling=greedy(50)) for at in range(8)])
    for _ in range(40):
        engine.step()
    before = engine.snapshot()
    engine.pull(lambda _: 1, 1)
    now = engine.snapshot()
    assert (now.running, now.waiting, now.context) == (8, 0, before.context)
    assert now.kv_used >= before.kv_used
