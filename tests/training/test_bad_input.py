"""Bad input is refused in one line that says what to write instead."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from staleflow.training import advantages, correction, losses
from staleflow.training.packed import SEQUENCE_MEAN, Aggregation, Segments, aggregate

THREE, TWO = torch.full((3,), -1.0), torch.full((2,), -1.0)
GROUPS = torch.zeros(3, dtype=torch.long)
SEGMENTS = Segments.of([2, 1])
PLAIN = correction.uncorrected(THREE)
NAN = torch.tensor([0.0, math.nan, 1.0])
NONE = torch.zeros(0)


def policy(name: str = "ppo", logprobs: Any = THREE, gains: Any = THREE, plain: Any = PLAIN, **knobs: Any) -> object:
    return losses.POLICY_LOSSES[name](logprobs, gains, SEGMENTS, plain, **knobs)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: advantages.grpo(NAN, GROUPS), "the reward of sequence 1 is nan: let the reward function"),
    (lambda: advantages.dr_grpo(NAN / 0, GROUPS), "let the reward function return a finite number"),
    (lambda: advantages.rloo(NONE, NONE), "the batch is empty or not flat"),
    (lambda: advantages.grpo(THREE, GROUPS[:2]), "2 group ids for 3 rewards: give the group of each"),
    (lambda: advantages.grpo(THREE, GROUPS, epsilon=-1), "epsilon=-1: use 0 or"),
    (lambda: advantages.reinforce_plus_plus(THREE, SEGMENTS), "rewards has shape (3,), but the batch has 2 sequences"),
    (lambda: advantages.reinforce_plus_plus(NAN[:2], SEGMENTS), "the reward of sequence 1 is nan"),
    (lambda: advantages.whiten(NONE), "nothing to whiten: give at least one"),
    (lambda: advantages.whiten(THREE, epsilon=math.nan), "epsilon=nan: use 0 or"),
    (lambda: advantages.gae(NAN, THREE, SEGMENTS), "the reward of token 1 is nan"),
    (lambda: advantages.gae(TWO, THREE, SEGMENTS), "rewards has shape (2,), but the batch has 3 tokens"),
    (lambda: advantages.gae(THREE, THREE, SEGMENTS, gamma=1.1), "gamma=1.1, lam=0.95: both must be"),
    (lambda: advantages.final_rewards(THREE, SEGMENTS), "give one value per sequence"),
    (lambda: advantages.overlong_penalty(GROUPS, 10, 0), "use 0 < buffer <= max_length"),
    (lambda: advantages.overlong_penalty(GROUPS, 10, 5, factor=-1), "factor=-1: the penalty is subtracted"),
    (lambda: advantages.no_signal([]), "give one reward per sequence"),
    (lambda: advantages.no_signal([1.0, math.nan]), "the reward of sequence 1 is nan"),
    (lambda: Segments.of([]), "the batch is empty: give the length"),
    (lambda: Segments.of([3, 0]), "sequence 1 has 0 tokens: leave it out"),
    (lambda: Segments.of([1.5]), "give whole numbers"),  # pyright: ignore[reportArgumentType]
    (lambda: Aggregation("fixed-length"), "only fixed-length takes a length"),
    (lambda: Aggregation("token-mean", 5), "only fixed-length takes a length"),
    (lambda: Aggregation("fixed-length", 0), "length=0: give fixed-length"),
    (lambda: Aggregation(cast(Any, "mean")), "aggregation 'mean' is unknown: use token-mean"),
    (lambda: aggregate(THREE, SEGMENTS, SEQUENCE_MEAN, torch.tensor([True])), "keep has shape (1,)"),
    (lambda: correction.truncated(THREE, THREE, cap=0), "cap=0: the largest importance weight must be above 0"),
    (lambda: correction.truncated(THREE, THREE, cap=math.nan), "cap=nan"),
    (lambda: correction.truncated(THREE, TWO), "shape (3,), the engine's (2,): give both flat"),
    (lambda: correction.decoupled(THREE[None], THREE[None]), "give both flat"),
    (lambda: correction.masked_by_sequence(THREE, THREE, SEGMENTS, 1.1, 2), "use 0 < low <= 1 <= high"),
    (lambda: correction.masked_by_sequence(THREE, THREE, SEGMENTS, 0, 2), "use 0 < low <= 1 <= high"),
    (lambda: correction.masked_by_sequence(TWO, TWO, SEGMENTS, 0.5, 2), "but the batch has 3 tokens"),
    (lambda: correction.difference(THREE, THREE, threshold=0), "threshold=0: give a difference"),
    (lambda: policy(logprobs=TWO), "logprobs has shape (2,), but the batch has 3 tokens: give one value per token"),
    (lambda: policy(gains=TWO), "advantages has shape (2,)"),
    (lambda: policy(plain=correction.uncorrected(TWO)), "anchor has shape (2,)"),
    (lambda: policy(dual_clip=1.0), "dual_clip=1.0: use a ratio above 1"),
    (lambda: policy("dapo", aggregation=SEQUENCE_MEAN), "use token-mean or the ppo loss"),
    (lambda: losses.value_loss(THREE, THREE, THREE, SEGMENTS, eps=-0.1), "eps=-0.1: the clip of values must be 0"),
    (lambda: losses.value_loss(THREE, TWO, THREE, SEGMENTS), "returns has shape (2,)"),
    (lambda: losses.kl_loss(THREE, THREE, SEGMENTS, estimator="k1"), "use k2 or k3"),
    (lambda: losses.kl_to_reference(THREE, THREE, cast(Any, "k4")), "estimator 'k4' is unknown: use k1, k2 or k3"),
    (lambda: losses.kl_to_reference(THREE, TWO), "3 log-probabilities and 2 of the reference"),
    (lambda: losses.streamable("grop", "ppo"), "advantage 'grop' is unknown: use one of grpo, dr_grpo, rloo"),
    (lambda: losses.streamable("grpo", "sft"), "loss 'sft' is unknown: use one of ppo, dapo, gspo, cispo"),
    (lambda: losses.streamable("grpo", "ppo", updates=0), "updates=0: a step makes at least 1"),
    *(
        (lambda name=name, knobs=knobs: policy(name, **knobs), text)
        for name in losses.POLICY_LOSSES
        for knobs, text in (
            ({"eps_low": -0.1}, "eps_low=-0.1: use 0 to 1"),
            ({"eps_low": 1.5}, "eps_low=1.5: use 0 to 1"),
            ({"eps_high": -0.1}, "eps_high=-0.1: use 0 or more"),
            ({"eps_high": math.nan}, "eps_high=nan: use 0 or more"),
        )
    ),
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
