"""Advantages: worked cases, groups without a signal, and equality with loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.training.advantages import (
    dr_grpo,
    final_rewards,
    gae,
    grpo,
    overlong_penalty,
    reinforce_plus_plus,
    rloo,
    whiten,
)
from staleflow.training.options import ADVANTAGES
from staleflow.training.packed import Segments

from . import oracle
from .batches import Batch, batches, doubles, quick

# Two groups, interleaved: 7 has rewards 1, 0, 0, 1 (mean 1/2, squares 4 * 1/4, std sqrt(1/3)); 3 has 2, 5 (mean 7/2,
# std sqrt(9/2)).
REWARDS = doubles(1, 2, 0, 0, 5, 1)
GROUPS = torch.tensor([7, 3, 7, 7, 3, 7])
ONES = Segments.of([1] * 6)
BY_GROUP = {name: ADVANTAGES.load(name) for name, entry in ADVANTAGES.entries.items() if entry.scope == "group"}


def test_grpo_divides_by_the_standard_deviation_of_the_group():
    half, pair = 0.5 / math.sqrt(1 / 3), 1.5 / math.sqrt(4.5)
    expected = doubles(half, -pair, -half, -half, pair, half)
    torch.testing.assert_close(grpo(REWARDS, GROUPS, ONES, epsilon=0), expected)
    torch.testing.assert_close(grpo(REWARDS, GROUPS, ONES), expected, rtol=1e-5, atol=0)


def test_dr_grpo_only_subtracts_the_mean_of_the_group():
    torch.testing.assert_close(dr_grpo(REWARDS, GROUPS, ONES), doubles(0.5, -1.5, -0.5, -0.5, 1.5, 0.5))


def test_rloo_compares_with_the_other_members_only():
    # 1 - (0 + 0 + 1)/3 = 2/3;  0 - (1 + 0 + 1)/3 = -2/3;  2 - 5 = -3.
    torch.testing.assert_close(rloo(REWARDS, GROUPS, ONES), doubles(2 / 3, -3, -2 / 3, -2 / 3, 3, 2 / 3))


def test_reinforce_plus_plus_weighs_rewards_by_tokens():
    # Tokens have rewards 1 1 1 0: mean 3/4, variance 3/16.
    std = math.sqrt(3 / 16)
    advantages = reinforce_plus_plus(doubles(1, 0), torch.tensor([0, 1]), Segments.of([3, 1]), epsilon=0)
    torch.testing.assert_close(advantages, doubles(0.25 / std, -0.75 / std))


def test_gae_by_hand_and_not_across_sequences():
    # gamma = 1/2, lam = 1/2. First: rewards 0 0 1, values 1 2 4: delta = 0 + 1 - 1, 0 + 2 - 2, 1 + 0 - 4 = 0, 0, -3,
    # A = -3/16, -3/4, -3. Second: reward 8, value 2: A = 6.
    segments = Segments.of([3, 1])
    values = doubles(1, 2, 4, 2)
    found = gae(final_rewards(doubles(1, 8), segments), values, segments, gamma=0.5, lam=0.5)
    torch.testing.assert_close(found.advantages_T, doubles(-3 / 16, -3 / 4, -3, 6))
    torch.testing.assert_close(found.returns_T, found.advantages_T + values)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
@quick(60)
def test_gae_by_doubling_equals_the_recurrence(lengths: list[int], gamma: float, lam: float, seed: int):
    generator, segments = torch.Generator().manual_seed(seed), Segments.of(lengths)
    rewards_T, values_T = torch.randn(2, segments.tokens, generator=generator, dtype=torch.float64)
    found = gae(rewards_T, values_T, segments, gamma, lam).advantages_T
    rows = zip(rewards_T.split(lengths), values_T.split(lengths), strict=True)
    expected = [a for r, v in rows for a in oracle.gae(r.tolist(), v.tolist(), gamma, lam)]
    torch.testing.assert_close(found, doubles(*expected), rtol=1e-10, atol=1e-10)


@given(batches())
@quick(60)
def test_group_advantages_equal_loops_over_groups(batch: Batch):
    for kind, function in BY_GROUP.items():
        expected = oracle.group_advantages(kind, batch.rewards_N.tolist(), batch.groups)
        torch.testing.assert_close(
            function(batch.rewards_N, torch.tensor(batch.groups), batch.segments), doubles(*expected)
        )


@given(batches(), st.randoms(use_true_random=False))
@quick(40)
def test_the_order_of_sequences_does_not_matter(batch: Batch, random):
    order = list(range(len(batch.groups)))
    random.shuffle(order)
    for function in BY_GROUP.values():
        straight = function(batch.rewards_N, torch.tensor(batch.groups), batch.segments)
        shuffled = function(batch.rewards_N[order], torch.tensor(batch.groups)[order], batch.segments)
        torch.testing.assert_close(shuffled, straight[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", BY_GROUP.values(), ids=BY_GROUP.keys())
def test_no_signal_means_exactly_zero_and_never_nan(function):
    # The mean of three times 0.1 is not 0.1 in floating point: a division by the deviation would blow that up.
    advantages = function(doubles(0.1, 0.1, 0.1, 5.0), torch.tensor([0, 0, 0, 1]), Segments.of([1] * 4))
    assert advantages.tolist() == [0, 0, 0, 0]


def test_a_batch_of_equal_rewards_whitens_to_zero():
    assert reinforce_plus_plus(doubles(0.1, 0.1, 0.1), torch.zeros(3), Segments.of([1, 2, 3]), epsilon=0).tolist() == [
        0,
        0,
        0,
    ]
    assert reinforce_plus_plus(doubles(3), torch.zeros(1), Segments.of([2])).tolist() == [0]


def test_whitened_values_have_mean_zero_and_deviation_one():
    # Mean 3, population variance (4 + 0 + 4) / 3.
    torch.testing.assert_close(whiten(doubles(1, 3, 5), epsilon=0), doubles(-2, 0, 2) / math.sqrt(8 / 3))


def test_overlong_penalty_falls_in_the_buffer():
    # Limit 10, buffer 4: free up to 6, then 1/4 each.
    found = overlong_penalty(torch.tensor([1, 6, 7, 9, 10, 12]), max_length=10, buffer=4, factor=2.0)
    torch.testing.assert_close(found, doubles(0, 0, -0.5, -1.5, -2, -2))


def test_half_precision_rewards_do_not_lose_the_group_mean():
    rewards = torch.tensor([1.0, 0.0, 0.0], dtype=torch.bfloat16)
    torch.testing.assert_close(dr_grpo(rewards, torch.zeros(3), Segments.of([1] * 3)), doubles(2 / 3, -1 / 3, -1 / 3))
