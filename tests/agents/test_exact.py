"""Agents that edit, retry, resample and branch while weights change: what is trained is what the engine made."""

import pytest

from bench.agents_exact import measure

NEVER = (
    "calls with other tokens than were made",
    "retries with another answer",
    "log-probability mismatches",
    "made tokens that no agent heard",
)


@pytest.mark.parametrize("episodes", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_made_token_is_tokenised_again_lost_or_given_another_log_probability(episodes: int) -> None:
    found = measure(episodes, seed=episodes)
    assert {name: found[name] for name in NEVER} == dict.fromkeys(NEVER, 0)
    for happened in ("resample", "drop", "retries", "pulls", "answers that would be tokenised otherwise"):
        assert found[happened] > 0
    assert found["branches"] > episodes
    assert found["mixed branches"] > 0
