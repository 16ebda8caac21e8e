"""What was computed once is not computed again, and using it changes nothing."""

from collections.abc import Callable

import pytest

from staleflow.rollout.engine import Request, Sampling
from tests.rollout.conftest import Tiny, drain, greedy, prompt, resume

Models = Callable[..., Tiny]


@pytest.mark.parametrize("length", [1, 2, 8, 9, 16, 17, 23, 40])
def test_prompt_of_a_group_is_prefilled_once(tiny: Models, length: int) -> None:
    model = tiny("llama")
    p = prompt(length)
    engine = model.engine(prefill_tokens=12)
    engine.submit([Request(f"t{at}", 1, p, group="g", sampling=Sampling(max_tokens=20)) for at in range(6)])
    together, _, _ = drain(engine)
    # The leader prefills all; each other member runs the last token of the prompt as its first decoding step.
    assert engine.scheduler.prefilled <= length
    assert engine.scheduler.reused == 5 * (length - 1)
    for name, result in together.items():
        alone = model.engine()
        alone.submit([Request(name, 1, p, sampling=Sampling(max_tokens=20))])
        assert drain(alone)[0][name].tokens == result.tokens
        assert result.logprobs == pytest.approx(model.logprobs(p, result.tokens), abs=1e-4)
    assert len({tuple(result.tokens) for result in together.values()}) > 1


def test_members_share_the_memory_of_their_prompt(tiny: Models) -> None:
    engine = tiny("llama").engine(page_size=8)
    engine.submit([Request(f"t{at}", 1, prompt(65), group="g", sampling=greedy(5)) for at in range(8)])
    for _ in range(3):
        engine.step()
    assert engine.snapshot().running == 8
    assert engine.pool.used == 8 + 8  # the prompt's full pages once, and a page for each member's own tokens


def test_members_that_wait_for_their_prompt_do_not_block_others(tiny: Models) -> None:
    engine = tiny("llama").engine(prefill_tokens=16)
    group = [Request(f"t{at}", 1, prompt(40), group="g", sampling=greedy(5)) for at in range(3)]
    engine.submit([*group, Request("other", 1, prompt(3), sampling=greedy(5))])
    while engine.peek("t1", 0) is None:
        engine.step()
    other = engine.peek("other", 0)
    assert other is None or len(other.tokens) > 1, "it began, or even ended, before"


def test_returning_trajectory_skips_its_prefill(tiny: Models) -> None:
    model = tiny("llama")
    request = Request("t", 1, prompt(30), sampling=greedy(40))
    engine = model.engine()
    engine.submit([request])
    for _ in range(20):
        engine.step()
    engine.interrupt(["t"])
    (result,) = engine.step().returned
    assert engine.pool.used == 0
    before = engine.scheduler.prefilled
    engine.submit([resume(result, request)])
    again = drain(engine)[0]["t"]
    assert engine.scheduler.prefilled == before
    assert engine.scheduler.reused == 30 + len(result.tokens) - 1
    assert again.tokens == model.greedy(prompt(30), 40)
    assert again.logprobs == pytest.approx(model.logprobs(prompt(30), again.tokens), abs=1e-4)


def test_returning_trajectory_whose_pages_were_needed_by_others_is_prefilled_again(tiny: Models) -> None:
    model = tiny("llama")
    request = Request("t", 1, prompt(30), sampling=greedy(40))
    engine = model.engine(kv_tokens=128)
    engine.submit([request])
    for _ in range(20):
        engine.step()
    engine.interrupt(["t"])
    (result,) = engine.step().returned
    engine.submit([Request("big", 1, prompt(100), sampling=greedy(20))])
    drain(engine)
    engine.submit([resume(result, request)])
    assert drain(engine)[0]["t"].tokens == model.greedy(prompt(30), 40)
    assert engine.scheduler.reused < 30


def test_partly_filled_page_is_not_overwritten_for_a_second_reader(tiny: Models) -> None:
    """Two trajectories resume from one cached page: one continues in it, the other must get its own copy."""
    model = tiny("llama")
    p = prompt(12)
    first = Request("a", 1, p, sampling=greedy(30))
    engine = model.engine(page_size=8)
    engine.submit([first])
    engine.step()
    engine.step()
    engine.interrupt(["a"])
    (result,) = engine.step().returned
    twins = [Request(name, 1, p, result.tokens, result.logprobs, result.spans, sampling=greedy(30)) for name in "bc"]
    engine.submit(twins)
    finished, _, _ = drain(engine)
    assert finished["b"].tokens == finished["c"].tokens == model.greedy(p, 30)
    assert engine.scheduler.prefilled == len(p)


def test_cached_prompt_serves_a_later_member(tiny: Models) -> None:
    model = tiny("llama")
    engine = model.engine()
    engine.submit([Request("a", 1, prompt(21), group="g", sampling=greedy(10))])
    drain(engine)
    engine.submit([Request("b", 1, prompt(21), group="g", sampling=greedy(10))])
    assert drain(engine)[0]["b"].tokens == model.greedy(prompt(21), 10)
    assert engine.scheduler.prefilled == 21


def test_page_known_by_its_beginning_and_as_a_whole_is_not_overwritten(tiny: Models) -> None:
    """A member takes the end of the prompt from a page that also holds what another trajectory generated."""
    model = tiny("llama")
    p = prompt(12)
    first = Request("a", 1, p, group="g", sampling=greedy(30))
    engine = model.engine(page_size=8)
    engine.submit([first])
    for _ in range(15):
        engine.step()
    engine.interrupt(["a"])
    (result,) = engine.step().returned
    engine.submit([Request("b", 1, p, group="g", sampling=Sampling(max_tokens=20))])
    drain(engine)
    engine.submit([resume(result, first)])
    again = drain(engine)[0]["a"]
    assert again.tokens == model.greedy(p, 30)
    assert again.logprobs == pytest.approx(model.logprobs(p, again.tokens), abs=1e-4)
    assert engine.scheduler.prefilled == len(p)
