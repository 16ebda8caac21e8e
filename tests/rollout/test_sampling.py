"""Tokens are drawn from the distribution that is asked for, and their log-probability is that of this distribution."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from staleflow.rollout import sampling
from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.sampling import Params, draw, uniform
from tests.rollout.conftest import Tiny, drain, prompt

Models = Callable[..., Tiny]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


def params(count: int, **values: Any) -> Params:
    given = Sampling(**values)
    return Params(
        seed=np.arange(count, dtype=np.uint64) * np.uint64(77),
        drawn=np.zeros(count, np.int64),
        temperature=np.full(count, given.temperature, np.float32),
        top_p=np.full(count, given.top_p),
        top_k=np.full(count, given.top_k),
        min_p=np.full(count, given.min_p, np.float32),
    )


def exact(logits: torch.Tensor, **values: Any) -> torch.Tensor:
    """The distribution by transformers' own processors."""
    given = Sampling(**values)
    steps = LogitsProcessorList([TemperatureLogitsWarper(given.temperature)])
    if given.top_k:
        steps.append(TopKLogitsWarper(given.top_k))
    if given.top_p < 1:
        steps.append(TopPLogitsWarper(given.top_p))
    if given.min_p:
        steps.append(MinPLogitsWarper(given.min_p))
    return torch.softmax(steps(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())[0], -1)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [13, 96, 512, 1000])
@pytest.mark.parametrize("values", SETTINGS)
def test_samples_follow_the_exact_distribution(values: dict[str, Any], vocabulary: int) -> None:
    """Chi-square over 20,000 draws; the seeds are fixed, so it gives the same value every time."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 1.5
    wanted = exact(logits, **values).numpy()
    count = 20_000
    drawn = draw(logits.repeat(count, 1), params(count, **values))
    assert all(drawn.sound)
    seen = np.bincount(drawn.tokens, minlength=vocabulary)
    assert not seen[wanted == 0].any(), "a token was drawn that truncation excludes"
    common = wanted * count >= 5
    rest = count - seen[common].sum()
    parts = (seen[common] - wanted[common] * count) ** 2 / (wanted[common] * count)
    expected_rest = max(wanted[~common].sum() * count, 1e-9)
    chi = parts.sum() + ((rest - expected_rest) ** 2 / expected_rest if expected_rest > 1 else 0)
    freedom = max(1, common.sum() - (expected_rest <= 1))
    assert chi < freedom + 4 * np.sqrt(2 * freedom) + 4
    assert drawn.logprobs == pytest.approx(np.log(wanted[drawn.tokens]), abs=1e-4)


def test_top_p_that_reaches_past_the_first_candidates_is_still_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CANDIDATES", 8)
    logits = torch.randn(400, generator=torch.Generator().manual_seed(1)) * 0.3
    wanted = exact(logits, top_p=0.9).numpy()
    drawn = draw(logits.repeat(3000, 1), params(3000, top_p=0.9))
    assert (wanted[drawn.tokens] > 0).all()
    assert drawn.logprobs == pytest.approx(np.log(wanted[drawn.tokens]), abs=1e-4)
    assert len(set(drawn.tokens)) > 150


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    chance = torch.Generator().manual_seed(3)
    logits = torch.randn(len(SETTINGS) + 1, 300, generator=chance)
    columns = [params(1, **values) for values in [*SETTINGS, {"temperature": 0.0}]]
    together = draw(logits.clone(), Params(*(np.concatenate(parts) for parts in zip(*columns, strict=True))))
    for row, column in enumerate(columns):
        alone = draw(logits[row : row + 1].clone(), column)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-6)


def test_greedy_reports_the_models_own_log_probability() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(4))
    drawn = draw(logits.clone(), params(5, temperature=0.0))
    assert drawn.tokens == logits.argmax(-1).tolist()
    assert drawn.logprobs == pytest.approx(torch.log_softmax(logits, -1).amax(-1).tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("values", [*SETTINGS, {"temperature": 0.0}])
def test_row_that_is_not_finite_is_marked_and_others_are_drawn(values: dict[str, Any], bad: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    fine = draw(logits.clone(), params(3, **values))
    logits[1, 17] = bad
    drawn = draw(logits, params(3, **values))
    assert drawn.sound == [True, False, True]
    assert (drawn.tokens[0], drawn.tokens[2]) == (fine.tokens[0], fine.tokens[2])
    assert all(0 <= token < 40 for token in drawn.tokens)


def test_token_of_certain_probability_is_drawn_whatever_the_number() -> None:
    logits = torch.full((1000, 700), -200.0)
    logits[:, 699] = 0.0
    assert set(draw(logits, params(1000)).tokens) == {699}


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    numbers = uniform(seeds, np.tile(np.arange(200), 200))
    assert len(set(numbers)) == 40_000
    assert 0 <= numbers.min() < numbers.max() < 1
    seen = np.bincount((numbers * 50).astype(int), minlength=50)
    assert ((seen - 800) ** 2 / 800).sum() < 49 + 4 * np.sqrt(98)
    pairs = numbers.reshape(200, 200)
    assert abs(np.corrcoef(pairs[:, :-1].ravel(), pairs[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(pairs[:-1].ravel(), pairs[1:].ravel())[0, 1]) < 0.02


def test_samples_do_not_depend_on_neighbours(tiny: Models) -> None:
    model = tiny("llama")
    requests = [
        Request(f"t{at}", 1, prompt(3 + 7 * at), sampling=Sampling(max_tokens=30, **SETTINGS[at % len(SETTINGS)]))
        for at in range(8)
    ]
    engine = model.engine(max_running=5, prefill_tokens=17)
    engine.submit(requests)
    together, _, _ = drain(engine)
    for request in requests:
        alone = model.engine()
        alone.submit([request])
        assert drain(alone)[0][request.name].tokens == together[request.name].tokens


def test_seed_decides_and_the_name_stands_in_for_it(tiny: Models) -> None:
    model = tiny("llama")

    def tokens(name: str, seed: int | None) -> list[int]:
        engine = model.engine()
        engine.submit([Request(name, 1, prompt(4), sampling=Sampling(max_tokens=20, seed=seed))])
        return drain(engine)[0][name].tokens

    assert tokens("a", 5) == tokens("b", 5) != tokens("a", 6)
    assert tokens("a", None) == tokens("a", None) != tokens("b", None)
