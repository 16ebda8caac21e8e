"""A step that is accumulated group by group has the gradients of the whole batch, or says why it cannot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from staleflow.training.advantages import reinforce_plus_plus
from staleflow.training.losses import entropy_bonus, kl_loss, value_loss
from staleflow.training.options import ADVANTAGES, CORRECTIONS, LOSSES, TrainerOptions
from staleflow.training.packed import Aggregation, LossSum, scale_gradients

from .batches import AGGREGATIONS, EPS, Batch, Model, advantages, batches, correction, make, quick, token_entropy

Way = tuple[str, str, str, Aggregation]
WAYS: list[Way] = [
    (advantage, loss, kind, aggregation)
    for advantage, loss, kind, aggregation in product(
        ADVANTAGES.entries, LOSSES.entries, CORRECTIONS.entries, AGGREGATIONS
    )
    if TrainerOptions(0, advantage, loss).whole_batch is None
]


def loss_of(batch: Batch, model: Model, way: Way) -> LossSum:
    """With all the terms a step can have, from what is known of these groups alone."""
    advantage, name, kind, aggregation = way
    segments, logprobs_T = batch.segments, model.logprobs(batch)
    held_T, noise_T = logprobs_T.detach(), batch.noise_T.to(logprobs_T)
    # Noise comes with the batch and not from the model, so that it is the same however the batch is cut.
    correct = correction(kind, held_T + 0.3 * noise_T.sin(), held_T + noise_T, segments)
    advantages_T = advantages(advantage, batch, model)
    loss = LOSSES.load(name)(logprobs_T, advantages_T, segments, correct, aggregation, **EPS[name])
    loss = loss.plus(kl_loss(logprobs_T, held_T + noise_T.cos(), segments, aggregation, correct.keep_N), 0.1)
    loss = loss.plus(entropy_bonus(token_entropy(model.logits(batch)), segments, aggregation, correct.keep_N), 0.05)
    if advantage == "gae":
        values_T = model.values(batch)
        terms = (values_T, advantages_T + values_T.detach(), values_T.detach() + 0.1 * noise_T)
        loss = loss.plus(value_loss(*terms, segments, aggregation, correct.keep_N), 0.5)
    return loss


def gradients(model: Model) -> list[Tensor]:
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()]


def whole(batch: Batch, way: Way, dtype: torch.dtype = torch.float64) -> tuple[LossSum, list[Tensor]]:
    model = Model(dtype)
    loss = loss_of(batch, model, way)
    loss.mean.backward()
    return loss.detach(), gradients(model)


def streamed(chunks: Iterable[Batch], way: Way, dtype: torch.dtype = torch.float64) -> tuple[LossSum, list[Tensor]]:
    model, step = Model(dtype), LossSum.zero(way[3])
    for chunk in chunks:
        loss = loss_of(chunk, model, way)
        loss.total.backward()
        step = step + loss.detach()
        assert not step.total.requires_grad, "a step must not hold the graphs of its chunks in memory"
    scale_gradients(model.parameters(), step.scale)
    return step, gradients(model)


def cut(batch: Batch, random: Random) -> list[Batch]:
    """Into chunks of whole groups, in any order of groups."""
    groups = sorted(set(batch.groups))
    random.shuffle(groups)
    chunks: list[list[int]] = [[]]
    for group in groups:
        if chunks[-1] and random.random() < 0.6:
            chunks.append([])
        chunks[-1].append(group)
    return [batch.pick(each) for each in chunks]


def assert_same_metrics(found: LossSum, expected: LossSum, tolerance: float) -> None:
    mine, its = found.metrics.values(), expected.metrics.values()
    assert mine.keys() == its.keys()
    for name, value in mine.items():
        assert math.isclose(value, its[name], rel_tol=tolerance, abs_tol=tolerance), name


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join((*way[:3], way[3].kind)))
@given(batch=batches(), random=st.randoms(use_true_random=False))
@quick(8)
def test_accumulate_then_scale_equals_the_whole_batch(way: Way, batch: Batch, random: Random):
    expected, right = whole(batch, way)
    step, found = streamed(cut(batch, random), way)
    assert (step.tokens, step.sequences) == (expected.tokens, expected.sequences)
    torch.testing.assert_close(step.mean, expected.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    assert_same_metrics(step, expected, 1e-10)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join((*way[:3], way[3].kind)))
def test_single_precision_agrees_to_a_millionth(way: Way):
    random = Random(5)
    groups = [i // 4 for i in range(32)]
    batch = make([random.randint(1, 12) for _ in groups], groups, [float(random.random() < 0.5) for _ in groups])
    _, right = whole(batch, way, torch.float32)
    _, found = streamed(cut(batch, random), way, torch.float32)
    for mine, its in zip(found, right, strict=True):
        assert (mine - its).abs().max() <= 1e-6 * max(1.0, float(its.abs().max()))


@given(batch=batches(), random=st.randoms(use_true_random=False), way=st.sampled_from(WAYS))
@quick(60)
def test_the_order_of_groups_does_not_matter(batch: Batch, random: Random, way: Way):
    groups = sorted(set(batch.groups))
    random.shuffle(groups)
    expected, right = whole(batch, way)
    loss, found = whole(batch.pick(groups), way)
    torch.testing.assert_close(loss.mean, expected.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    assert_same_metrics(loss, expected, 1e-10)


def test_what_is_refused_would_indeed_differ():
    batch = make([2, 3, 1, 4], [0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0])
    all_at_once = reinforce_plus_plus(batch.rewards_N, torch.tensor(batch.groups), batch.segments)
    parts = [batch.pick([group]) for group in (0, 1)]
    in_parts = torch.cat(
        [reinforce_plus_plus(part.rewards_N, torch.tensor(part.groups), part.segments) for part in parts]
    )
    assert not torch.allclose(all_at_once, in_parts, atol=0.1)


def test_chunks_of_different_aggregations_do_not_add_up():
    with pytest.raises(ValueError, match="use one aggregation"):
        sum((LossSum.zero(each) for each in AGGREGATIONS[1:]), start=LossSum.zero(AGGREGATIONS[0]))


def test_parameters_without_a_gradient_are_left_alone():
    model = Model()
    scale_gradients(model.parameters(), 0.5)
    assert all(each.grad is None for each in model.parameters())
