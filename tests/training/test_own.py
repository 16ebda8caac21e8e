"""The user's own loss, advantage and correction: what they do wrong is one line that names the setting."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staleflow.errors import ConfigError
from staleflow.training.correction import Correction, uncorrected
from staleflow.training.losses import ppo_clip
from staleflow.training.options import ADVANTAGES, CORRECTIONS, LOSSES, TrainerOptions
from staleflow.training.own import SPARED, check_advantage, check_correction, check_loss, own_parts
from staleflow.training.packed import SEQUENCE_MEAN, TOKEN_MEAN, LossSum, Segments, aggregate

SEGMENTS = Segments.of([2, 1])
T, N = torch.full((3,), -1.0), torch.tensor([1.0, 0.0])
PLAIN = uncorrected(T, T, SEGMENTS)


def line_of_loss(losses: Callable[[Tensor], Any]) -> str:
    def mine(logprobs_T: Tensor, *_: Any) -> Any:
        return losses(logprobs_T)

    return refused(
        LOSSES.held("my:loss", mine, check_loss, SPARED), T.clone().requires_grad_(), T, SEGMENTS, PLAIN, TOKEN_MEAN
    )


def refused(function: Callable[..., Any], *given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        function(*given)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("losses", "line"),
    [
        (lambda _: None, "returned nothing: return what aggregate("),
        (lambda logprobs_T: logprobs_T.sum(), "returned an object of the type Tensor: return what aggregate("),
        (lambda logprobs_T: ppo_clip(logprobs_T.detach(), T, SEGMENTS, PLAIN), "returned a loss without a gradient"),
        (lambda logprobs_T: LossSum(logprobs_T, 3, 2, TOKEN_MEAN), "returned a loss of shape (3,)"),
        (lambda logprobs_T: aggregate(logprobs_T, SEGMENTS, SEQUENCE_MEAN), "returned a loss aggregated by sequence-"),
        (
            lambda logprobs_T: aggregate(logprobs_T[1:], SEGMENTS, TOKEN_MEAN),
            "losses has shape (2,), but the batch has",
        ),
        (lambda _: {}["x"], "failed (KeyError: 'x' at test_own.py, line "),
    ],
)
def test_a_loss_that_is_wrong_does_not_kill_six_trainers(losses: Callable[[Tensor], Any], line: str) -> None:
    assert f"training.loss=my:loss {line}" in line_of_loss(losses).replace("failed (ValueError: ", "")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([0.0, 1.0], "an object of the type list: return one number for each of the 2 sequences, or of the 3 tokens"),
        (N[:, None], "a tensor of shape (2, 1): return one number for each"),
        (N * math.nan, "nan at 0 of 2: return finite numbers"),
    ],
)
def test_an_advantage_that_is_wrong_is_not_trained_on(found: Any, line: str) -> None:
    mine = ADVANTAGES.held("my:advantage", lambda *_: found, check_advantage, SPARED)
    assert f"training.advantage=my:advantage returned {line}" in refused(mine, N, N.long(), SEGMENTS)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (T, "an object of the type Tensor: return Correction(anchor_T, weights_T)"),
        (Correction(T, None), "a Correction whose weights_T is nothing: give one value"),  # pyright: ignore[reportArgumentType]
        (Correction(N, T), "a Correction whose anchor_T has shape (2,): give one value for each of the 3 tokens"),
        (Correction(T, T, T > 0), "a Correction whose keep_N has shape (3,): give one value for each of the 2"),
        (Correction(T, T, N), "a Correction whose keep_N is torch.float32: give True or False"),
        (Correction(T, T, None, {}), "a Correction whose metrics are an object of the type dict"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_correction_that_is_wrong_is_named(found: Any, line: str) -> None:
    mine = CORRECTIONS.held("my:correction", lambda *_: found, check_correction, SPARED)
    assert f"training.correction=my:correction returned {line}" in refused(mine, T, T, SEGMENTS)


def test_numbers_of_another_precision_or_layout_are_taken() -> None:
    spaced_N = torch.stack([N, N], 1)[:, 0]
    for found in (N.double(), N.half(), N.long(), N > 0, spaced_N):
        assert (
            ADVANTAGES.held("my:advantage", lambda *_, found=found: found, check_advantage, SPARED)(N, N, SEGMENTS)
            is found
        )


def test_a_gpu_without_memory_is_not_taken_for_a_mistake_of_the_user() -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        LOSSES.held("my:loss", full, check_loss, SPARED)(T, T, SEGMENTS, PLAIN, TOKEN_MEAN)


def test_only_the_users_own_parts_are_suspected() -> None:
    assert own_parts(TrainerOptions(max_staleness=0, loss="my:loss")) == ["training.loss=my:loss"]
    assert LOSSES.held("ppo", ppo_clip, check_loss, SPARED) is ppo_clip
