"""KL, value head, several updates and groups without a signal, against the same written out row by row."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from staleflow.training.options import CORRECTIONS
from staleflow.training.trainer import GroupRows, Trainer, TrainerOptions
from staleflow.types import Row
from tests.training.oracle import gae
from tests.training.test_trainer import base, groups_of, updated

__all__ = ["base"]


def logprobs(model: Any, row: Row) -> Tensor:
    tokens = torch.from_numpy(np.concatenate([row.prompt, row.tokens]).astype(np.int64))
    every = torch.log_softmax(model(tokens[None]).logits[0], -1)[row.prompt.size - 1 : -1]
    return every.gather(1, tokens[row.prompt.size :, None])[:, 0]


def hidden(model: Any, row: Row) -> Tensor:
    tokens = torch.from_numpy(np.concatenate([row.prompt, row.tokens]).astype(np.int64))
    return model.model(tokens[None]).last_hidden_state[0][row.prompt.size - 1 : -1]


def as_drawn_by(model: Any, groups: list[GroupRows]) -> list[GroupRows]:
    with torch.no_grad():
        return [
            [replace(row, logprob_bytes=logprobs(model, row).numpy().astype("<f4").tobytes()) for row in group]
            for group in groups
        ]


def assert_same_gradients(trainer: Trainer, model: Any) -> None:
    for one, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        if one.requires_grad:
            assert other.grad.abs().max() > 0
            assert torch.allclose(one.grad, other.grad, atol=1e-6)


def shake(parameters: list[Tensor], scale: float = 0.05) -> None:
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in parameters:
            each += scale * torch.randn(each.shape, generator=random, dtype=each.dtype)


# KL


@pytest.mark.parametrize("lora", [0, 2])
def test_kl_pulls_towards_the_model_that_was_given(base: Any, lora: int) -> None:
    options = TrainerOptions(0, kl_coefficient=0.5, learning_rate=1e-2, lora_rank=lora)
    trainer = Trainer(copy.deepcopy(base), options)
    trainer.feed(0, groups_of(3, 4))
    assert trainer.finish(0).metrics["kl_reference"] == 0, "before the first update they are the same"
    groups = groups_of(3, 4, seed=1, version=1)
    trainer.feed(1, groups)
    report = trainer.finish(1)
    assert report.metrics["kl_reference"] > 0
    assert (trainer.reference is None) == (lora > 0), "adapters need no second copy"


@pytest.mark.parametrize("term", [{}, {"lora_rank": 2}, {"lora_rank": 2, "activation_checkpointing": True}])
def test_the_gradient_of_kl_is_that_of_its_estimate(base: Any, term: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(0, kl_coefficient=0.5, **term))
    shake(trainer.parameters)
    model = copy.deepcopy(trainer.model)
    groups = [[replace(row, reward=1.0) for row in group] for group in as_drawn_by(model, groups_of(3, 2))]
    trainer.feed(0, groups)
    total = torch.zeros(())
    for row in (row for group in groups for row in group):
        apart = logprobs(model, row) - logprobs(base, row).detach()
        total = total + 0.5 * (torch.exp(-apart) - 1 + apart).sum()
    total.backward()
    assert_same_gradients(trainer, model)


# The value head


def test_gae_has_the_gradients_of_ppo_written_out(base: Any) -> None:
    options = TrainerOptions(0, "gae", "ppo", gamma=0.9, gae_lambda=0.8, value_coefficient=0.3)
    trainer, model = Trainer(copy.deepcopy(base), options), copy.deepcopy(base)
    assert trainer.value_head is not None
    torch.manual_seed(1)
    torch.nn.init.normal_(trainer.value_head.linear.weight)
    head = copy.deepcopy(trainer.value_head)
    groups = as_drawn_by(base, groups_of(3, 2, seed=4))
    trainer.feed(0, groups)
    total = torch.zeros(())
    for row in (row for group in groups for row in group):
        values = head(hidden(model, row))
        rewards = [0.0] * (row.tokens.size - 1) + [row.reward]
        advantages = torch.tensor(gae(rewards, values.tolist(), 0.9, 0.8), dtype=torch.float64)
        total = total - (advantages * logprobs(model, row)).sum()
        total = total + 0.3 * 0.5 * ((values - (advantages + values.detach())) ** 2).sum()
    total.backward()
    assert_same_gradients(trainer, model)
    for one, other in zip(trainer.value_head.parameters(), head.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def test_the_value_head_learns_what_states_are_worth_at_its_own_rate(base: Any) -> None:
    options = TrainerOptions(0, "gae", learning_rate=1e-9, value_learning_rate=0.1, value_clip=math.inf)
    trainer = Trainer(copy.deepcopy(base), options)
    groups = [[replace(row, reward=1.0) for row in group] for group in groups_of(3, 2)]
    errors = []
    for step in range(30):
        fresh = [[replace(row, spans=((step, row.tokens.size),)) for row in group] for group in groups]
        trainer.feed(step, fresh)
        errors.append(trainer.finish(step).metrics["value_error_squared"])
    assert errors[-1] < errors[0] / 20
    assert not any("value" in name for name in trainer.weights()), "engines have no use for it"


# Several updates


def test_several_updates_are_those_of_steps_on_each_part(base: Any) -> None:
    groups = as_drawn_by(base, groups_of(5, 4, seed=2))
    options = TrainerOptions(9, "rloo", "ppo", learning_rate=1e-3, updates_per_step=2, skip_no_signal=False)
    together, report = updated(base, options, groups, [5])
    single = Trainer(copy.deepcopy(base), TrainerOptions(9, "rloo", "ppo", learning_rate=1e-3, skip_no_signal=False))
    for step, part in enumerate((groups[:2], groups[2:])):
        single.feed(step, part)
        single.finish(step)
    for one, other in zip(together, single.parameters, strict=True):
        assert torch.allclose(one, other, atol=1e-9)
    assert report.updates == 2


def test_the_proximal_policy_is_the_one_at_the_beginning_of_the_step(base: Any, monkeypatch: Any) -> None:
    groups = groups_of(4, 3, seed=2)
    seen: list[Tensor] = []
    correct = CORRECTIONS.load("decoupled")
    watched = {"decoupled": lambda proximal_T, *rest: seen.append(proximal_T) or correct(proximal_T, *rest)}
    monkeypatch.setattr(CORRECTIONS, "_loaded", watched)
    trainer = Trainer(
        copy.deepcopy(base), TrainerOptions(0, correction="decoupled", learning_rate=0.05, updates_per_step=4)
    )
    trainer.feed(0, groups)
    report = trainer.finish(0)
    rows = [row for group in groups for row in group if len({each.reward for each in group}) > 1]
    with torch.no_grad():
        expected = torch.cat([logprobs(base, row) for row in rows])
    assert torch.allclose(torch.cat(seen), expected, atol=1e-6)
    assert report.metrics["ratio_max"] > 1.001, "the policy has moved between the updates"


def test_more_updates_than_groups_make_one_for_each_group(base: Any) -> None:
    groups = groups_of(2, 4, seed=3)
    _, report = updated(base, TrainerOptions(0, updates_per_step=7, skip_no_signal=False), groups, [1, 1])
    assert report.updates == 2


# Groups without a signal


def flat(groups: list[GroupRows]) -> list[GroupRows]:
    return [[replace(row, reward=1.0) for row in group] for group in groups]


@pytest.mark.parametrize("pieces", [[5], [1, 1, 3]])
@pytest.mark.parametrize("updates", [1, 2])
def test_groups_without_a_signal_leave_no_trace_in_the_update(base: Any, pieces: list[int], updates: int) -> None:
    options = TrainerOptions(0, learning_rate=1e-2, updates_per_step=updates)
    useful, idle = groups_of(3, 4, seed=2), flat(groups_of(2, 4, seed=8))
    expected, alone = updated(base, options, useful, [3])
    assert alone.groups_without_signal == 0
    found, report = updated(base, options, [idle[0], useful[0], idle[1], *useful[1:]], pieces)
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-9)
    assert report.loss == pytest.approx(alone.loss)
    assert (report.groups, report.groups_without_signal) == (5, 2)
    assert report.tokens_without_signal == sum(row.tokens.size for group in idle for row in group)
    assert report.tokens == alone.tokens + report.tokens_without_signal


@pytest.mark.parametrize("term", [{}, {"advantage": "reinforce++"}, {"updates_per_step": 2}])
def test_a_step_without_any_signal_makes_the_next_version_of_the_same_model(base: Any, term: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(1, learning_rate=1e-2, **term))
    trainer.feed(0, groups_of(3, 4, seed=2))
    trainer.finish(0)  # so that Adam has a momentum, which would move the model on
    before = [each.detach().clone() for each in trainer.parameters]
    trainer.feed(1, flat(groups_of(2, 4, version=1)))
    report = trainer.finish(1)
    assert (report.updates, report.groups_without_signal, trainer.version) == (0, 2, 2)
    assert (report.loss, report.gradient_norm, report.reward) == (0, 0, 1)
    for one, other in zip(before, trainer.parameters, strict=True):
        assert torch.equal(one, other)


def test_the_report_has_the_reward_before_and_after_shaping(base: Any) -> None:
    options = TrainerOptions(0, overlong_buffer=8, max_tokens=8, overlong_penalty=2.0)
    groups = groups_of(3, 3)
    _, report = updated(base, options, groups, [3])
    rows = [row for group in groups for row in group]
    assert report.reward == pytest.approx(np.mean([row.reward for row in rows]))
    assert report.shaped_reward == pytest.approx(np.mean([row.reward - 2 * row.tokens.size / 8 for row in rows]))


def test_a_report_has_what_a_person_looks_at_first(base: Any) -> None:
    _, report = updated(base, TrainerOptions(0, "gae", kl_coefficient=0.1), groups_of(3, 3), [3])
    wanted = {"logprob_difference", "clip_fraction", "policy_entropy", "kl_reference", "explained_variance"}
    assert wanted <= report.metrics.keys()
    assert report.metrics["clip_fraction"] == report.metrics["clip_low"] + report.metrics["clip_high"]
