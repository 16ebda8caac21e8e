"""A trajectory ends where it should: stop tokens, stop strings across token borders, limits."""

from collections.abc import Callable

from staleflow.rollout.engine import Request, Sampling
from tests.rollout.conftest import Tiny, drain, prompt

Models = Callable[..., Tiny]


def text(tokens: list[int]) -> str:
    return "".join(chr(32 + token) for token in tokens)


def run(model: Tiny, sampling: Sampling, **resumed):
    engine = model.engine()
    engine.submit([Request("t", 1, prompt(5), sampling=sampling, **resumed)])
    return drain(engine)[0]["t"]


def test_stop_string_is_found_across_token_borders_and_kept(spelling: Tiny) -> None:
    free = run(spelling, Sampling(max_tokens=60))
    word = text(free.tokens)[20:23]
    assert len(word) == 3
    end = text(free.tokens).index(word) + 3
    result = run(spelling, Sampling(max_tokens=60, stop_strings=("no such text", word)))
    assert result.reason == "stop"
    assert result.tokens == free.tokens[:end]


def test_stop_string_that_began_before_an_interruption_is_found(spelling: Tiny) -> None:
    free = run(spelling, Sampling(max_tokens=60))
    word = text(free.tokens)[20:26]
    begun = {"tokens": free.tokens[:23], "logprobs": free.logprobs[:23], "spans": ((0, 23),)}
    result = run(spelling, Sampling(max_tokens=60, stop_strings=(word,)), **begun)
    assert (result.reason, result.tokens) == ("stop", free.tokens[:26])


def test_stop_string_that_reaches_into_the_prompt_does_not_count(spelling: Tiny) -> None:
    free = run(spelling, Sampling(max_tokens=10))
    across = text(prompt(5))[-1] + text(free.tokens)[0]
    result = run(spelling, Sampling(max_tokens=10, stop_strings=(across,)))
    assert len(result.tokens) > 1


def test_stop_token_ends_the_trajectory_and_is_kept(tiny: Models) -> None:
    model = tiny("llama")
    free = run(model, Sampling(max_tokens=40))
    stop = free.tokens[12]
    result = run(model, Sampling(max_tokens=40, stop_tokens=(stop,)))
    assert result.reason == "stop"
    assert result.tokens == free.tokens[: free.tokens.index(stop) + 1]


def test_token_limit_counts_what_was_generated_before(tiny: Models) -> None:
    model = tiny("llama")
    free = run(model, Sampling(max_tokens=20))
    begun = {"tokens": free.tokens[:12], "logprobs": free.logprobs[:12], "spans": ((0, 12),)}
    result = run(model, Sampling(max_tokens=20), **begun)
    assert (result.reason, result.tokens) == ("length", free.tokens)


def test_sequence_that_fills_the_memory_ends_and_says_why(tiny: Models) -> None:
    engine = tiny("llama").engine(kv_tokens=64, page_size=8)
    engine.submit([Request("t", 1, prompt(20)), Request("u", 1, prompt(21))])
    finished, _, _ = drain(engine)
    assert [finished[name].reason for name in "tu"] == ["capacity", "capacity"]
    assert [len(finished[name].tokens) for name in "tu"] == [45, 44]


def test_sequence_that_reaches_the_models_last_position_ends_and_says_why(tiny: Models) -> None:
    engine = tiny("llama").engine(kv_tokens=2048)
    engine.submit([Request("t", 1, prompt(500))])
    result = drain(engine)[0]["t"]
    assert (result.reason, len(result.tokens)) == ("capacity", 13)
