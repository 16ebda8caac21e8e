"""What is computed of a step: the cut into mini-batches, shaped rewards, groups without a signal."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.training.micro_batches import Known, micro_batches
from staleflow.training.options import TrainerOptions
from staleflow.training.packed import Segments
from staleflow.training.work import StepWork, estimate_by_gae, shaped_rewards, signals, with_advantages
from staleflow.types import Row

from .batches import quick


def row(size: int, reward: float = 0.0) -> Row:
    tokens = np.zeros(size, "<i4")
    return Row.of("p/0", np.zeros(2, "<i4"), tokens, np.zeros(size, "<f4"), ((0, size),), reward)


def numbered(sizes: list[list[int]]) -> StepWork:
    """Every token has its place as its advantage."""
    total = sum(map(sum, sizes))
    return StepWork([[row(size) for size in group] for group in sizes], Known(torch.arange(total).double()))


SIZES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=7)


@given(SIZES, st.integers(1, 9))
@quick(60)
def test_mini_batches_are_runs_of_groups_of_equal_numbers(sizes: list[list[int]], parts: int):
    cut = list(numbered(sizes).split(parts))
    assert sum(len(part.groups) for part in cut) == len(sizes)
    assert len(cut) == min(parts, len(sizes))
    counts = [len(part.groups) for part in cut]
    assert max(counts) - min(counts) <= 1
    known = [part.known.advantages_T for part in cut]
    assert torch.cat([each for each in known if each is not None]).tolist() == list(range(sum(map(sum, sizes))))
    for part, its in zip(cut, known, strict=True):
        assert its is not None
        assert len(its) == sum(part.tokens)


@given(SIZES, st.integers(1, 40))
@quick(60)
def test_each_pass_knows_its_own_tokens(sizes: list[list[int]], budget: int):
    work = numbered(sizes)
    begin = 0
    for batch in micro_batches(work.rows, budget, known=work.known):
        assert batch.known.advantages_T is not None
        assert batch.known.advantages_T.tolist() == list(range(begin, begin + batch.segments.tokens))
        assert batch.known.values_T is None
        begin += batch.segments.tokens
    assert begin == sum(work.tokens)


def test_only_some_groups_keep_what_is_known_of_them():
    work = numbered([[1, 2], [2], [3]]).only([True, False, True])
    assert [len(group) for group in work.groups] == [2, 1]
    assert work.known.advantages_T is not None
    assert work.known.advantages_T.tolist() == [0, 1, 2, 5, 6, 7]
    nothing = work.only([False, False])
    assert nothing.rows == []
    assert list(nothing.split(2)) == []


def test_groups_of_equal_rewards_have_no_signal():
    work = StepWork([[row(2, 1.0), row(3, 1.0)], [row(1, 0.0), row(2, 1.0)], [row(1, 0.3)]])
    assert signals(with_advantages(work, TrainerOptions(0))) == [False, True, False]
    assert signals(with_advantages(work, TrainerOptions(0, "gae"))) == [True, True, True]


def test_the_length_of_a_response_can_give_a_group_its_signal():
    # Limit 4, buffer 2: lengths 1, 3, 4 lose 0, 1/2 and 1, times 0.5.
    options = TrainerOptions(0, "dr_grpo", overlong_buffer=2, max_tokens=4, overlong_penalty=0.5)
    rewards_N = shaped_rewards(torch.ones(3).double(), torch.tensor([1, 3, 4]), options)
    assert rewards_N.tolist() == [1, 0.75, 0.5]
    work = with_advantages(StepWork([[row(1, 1.0), row(3, 1.0), row(4, 1.0)]]), options)
    assert work.known.advantages_T is not None
    assert work.known.advantages_T.tolist() == [0.25, 0, 0, 0, -0.25, -0.25, -0.25, -0.25]
    assert shaped_rewards(torch.ones(1), torch.tensor([9]), TrainerOptions(0)).tolist() == [1]


def test_gae_gets_the_shaped_reward_at_the_last_token():
    # Length 2 of at most 2, buffer 1: the reward 3 becomes 2. Values 1 1, gamma 1/2, lambda 0: 0 + 1/2 - 1, 2 - 1.
    options = TrainerOptions(0, "gae", gamma=0.5, gae_lambda=0.0, overlong_buffer=1, max_tokens=2)
    found = estimate_by_gae(torch.tensor([3.0]), torch.ones(2), Segments.of([2]), options)
    assert found.advantages_T.tolist() == [-0.5, 1.0]
    assert found.returns_T.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens(advantage: Any):
    groups = [[row(2, 1.0), row(3, 0.0)], [row(1, 0.0), row(2, 5.0)]]
    known = Known(values_T=torch.linspace(-1, 1, 8)) if advantage == "gae" else Known()
    found = with_advantages(StepWork(groups, known), TrainerOptions(0, advantage, whiten_advantages=True)).known
    assert found.advantages_T is not None
    assert float(found.advantages_T.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.advantages_T.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_what_holds_a_step_back_is_said():
    assert TrainerOptions(0, "gae", kl_coefficient=0.1, lora_rank=4).whole_batch is None
    assert "3 updates" in (TrainerOptions(0, updates_per_step=3).whole_batch or "")
    assert "gae advantages are whitened" in (TrainerOptions(0, "gae", whiten_advantages=True).whole_batch or "")


def test_a_pass_before_the_first_update_is_made_only_where_it_is_needed():
    needed = {
        "one update": TrainerOptions(0, "gae", correction="decoupled"),
        "nothing old is used": TrainerOptions(0, updates_per_step=2),
        "proximal": TrainerOptions(0, correction="decoupled", updates_per_step=2),
        "values": TrainerOptions(0, "gae", updates_per_step=2),
        "values of all": TrainerOptions(0, "gae", whiten_advantages=True),
    }
    assert [name for name, options in needed.items() if options.measures_first] == [
        "proximal",
        "values",
        "values of all",
    ]


@pytest.mark.parametrize("term", [{"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}, {"advantage": "gae"}])
def test_groups_without_a_signal_are_computed_if_another_term_needs_them(term: Any):
    assert TrainerOptions(0).skips
    assert not TrainerOptions(0, skip_no_signal=False).skips
    assert not TrainerOptions(0, **term).skips
