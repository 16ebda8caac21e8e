"""Bad input is refused in one line that says what to write instead."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from staleflow.training import advantages, correction, losses
from staleflow.training.options import LOSSES
from staleflow.training.packed import SEQUENCE_MEAN, Aggregation, Segments, aggregate

THREE, TWO = torch.full((3,), -1.0), torch.full((2,), -1.0)
GROUPS = torch.zeros(3, dtype=torch.long)
SEGMENTS = Segments.of([2, 1])
PLAIN = correction.uncorrected(THREE, THREE, SEGMENTS)
NAN = torch.tensor([0.0, math.nan, 1.0])
NONE = torch.zeros(0)


def policy(name: str = "ppo", logprobs: Any = THREE, gains: Any = THREE, plain: Any = PLAIN, **knobs: Any) -> object:
    return LOSSES.load(name)(logprobs, gains, SEGMENTS, plain, **knobs)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: advantages.grpo(NAN, GROUPS, SEGMENTS), "the reward of sequence 1 is nan: let the reward function"),
    (lambda: advantages.dr_grpo(NAN / 0, GROUPS, SEGMENTS), "let the reward function return a finite number"),
    (lambda: advantages.rloo(NONE, NONE, SEGMENTS), "the batch is empty or not flat"),
    (lambda: advantages.grpo(THREE, GROUPS[:2], SEGMENTS), "2 group ids for 3 rewards: give the group of each"),
    (
        lambda: advantages.reinforce_plus_plus(THREE, GROUPS, SEGMENTS),
        "rewards has shape (3,), but the batch has 2 sequences",
    ),
    (lambda: advantages.reinforce_plus_plus(NAN[:2], GROUPS, SEGMENTS), "the reward of sequence 1 is nan"),
    (lambda: advantages.whiten(NONE), "nothing to whiten: give at least one"),
    (lambda: advantages.gae(NAN, THREE, SEGMENTS), "the reward of token 1 is nan"),
    (lambda: advantages.gae(TWO, THREE, SEGMENTS), "rewards has shape (2,), but the batch has 3 tokens"),
    (lambda: advantages.final_rewards(THREE, SEGMENTS), "give one value per sequence"),
    (lambda: Segments.of([]), "the batch is empty: give the length"),
    (lambda: Segments.of([3, 0]), "sequence 1 has 0 tokens: leave it out"),
    (lambda: Segments.of([1.5]), "give whole numbers"),  # pyright: ignore[reportArgumentType]
    (lambda: Aggregation("fixed-length"), "only fixed-length takes a length"),
    (lambda: Aggregation("token-mean", 5), "only fixed-length takes a length"),
    (lambda: Aggregation("fixed-length", 0), "length=0: give fixed-length"),
    (lambda: Aggregation(cast(Any, "mean")), "aggregation 'mean' is unknown: use token-mean"),
    (lambda: aggregate(THREE, SEGMENTS, SEQUENCE_MEAN, torch.tensor([True])), "keep has shape (1,)"),
    (lambda: correction.truncated(THREE, TWO, SEGMENTS), "shape (3,), the engine's (2,): give both flat"),
    (lambda: correction.decoupled(THREE[None], THREE[None], SEGMENTS), "give both flat"),
    (lambda: correction.masked_by_sequence(TWO, TWO, SEGMENTS), "but the batch has 3 tokens"),
    (lambda: correction.difference(THREE, THREE, threshold=0), "threshold=0: give a difference"),
    (lambda: policy(logprobs=TWO), "logprobs has shape (2,), but the batch has 3 tokens: give one value per token"),
    (lambda: policy(gains=TWO), "advantages has shape (2,)"),
    (lambda: policy(plain=correction.uncorrected(TWO, TWO, SEGMENTS)), "anchor has shape (2,)"),
    (lambda: losses.value_loss(THREE, TWO, THREE, SEGMENTS), "returns has shape (2,)"),
    (lambda: losses.kl_loss(THREE, TWO, SEGMENTS), "reference has shape (2,)"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused_with_the_fix(call: Callable[[], object], text: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is checked below)
        call()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_terms_over_other_tokens_are_refused():
    loss = losses.ppo_clip(THREE, THREE, SEGMENTS, PLAIN)
    masked = losses.entropy_bonus(THREE, SEGMENTS, loss.aggregation, torch.tensor([True, False]))
    with pytest.raises(ValueError, match="give both the same keep_N and aggregation"):
        loss.plus(masked, 0.1)
