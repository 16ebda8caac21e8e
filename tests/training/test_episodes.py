"""Rows of episodes in the trainer, against plain loops: given tokens are not trained, and branches add no weight."""

import copy
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.training.trainer import GroupRows, StalenessError, Trainer, TrainerOptions
from staleflow.types import GIVEN, Row

VOCABULARY = 12
LONGEST = 9
Kind = Literal["token-mean", "sequence-mean", "fixed-length"]


@pytest.fixture(scope="module")
def base() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY
    )
    return LlamaForCausalLM(config).double()


def random_row(name: str, reward: float, masked: bool, random: np.random.Generator) -> Row:
    """Given and made runs in turn, of two versions; it may end with given tokens."""
    spans: list[tuple[int, int]] = []
    for _ in range(int(random.integers(1, 4))):
        spans += [(GIVEN, int(random.integers(1, 4))), (int(random.integers(0, 2)), int(random.integers(1, 4)))]
    if random.random() < 0.3:
        spans.append((GIVEN, 2))
    made = np.repeat([version >= 0 for version, _ in spans], [count for _, count in spans])
    logprobs = np.where(made, np.log(random.uniform(0.05, 0.12, made.size)), 0)
    prompt, tokens = random.integers(0, VOCABULARY, 3), random.integers(0, VOCABULARY, made.size)
    return Row.of(name, prompt, tokens, logprobs, spans, reward, name.partition("~")[0], masked)


def random_groups(seed: int) -> list[GroupRows]:
    random = np.random.default_rng(seed)
    groups: list[GroupRows] = []
    for group in range(3):
        rows: list[Row] = []
        for member in range(4):
            reward, masked = float(random.integers(0, 3)), bool(random.random() < 0.2)
            for branch in range(int(random.integers(1, 4))):
                name = f"p{group}/{member}" + (f"~{branch}" if branch else "")
                rows.append(random_row(name, reward, masked, random))
        groups.append(rows)
    return groups


def plain_loss(model: Any, groups: list[GroupRows], kind: Kind) -> torch.Tensor:
    """Of each episode the losses of all its made tokens, then as papers write it. PPO against the engine's own."""
    episodes: list[torch.Tensor] = []
    for group in groups:
        rewards = {row.episode: row.reward for row in group}
        mean, std = np.mean(list(rewards.values())), np.std(list(rewards.values()), ddof=1)
        if std == 0:
            continue
        for episode, reward in rewards.items():
            advantage = float((reward - mean) / (std + 1e-6))
            losses: list[torch.Tensor] = []
            for row in group:
                if row.episode != episode or row.masked:
                    continue
                tokens = torch.from_numpy(np.concatenate([row.prompt, row.tokens]).astype(np.int64))
                every = torch.log_softmax(model(tokens[None]).logits[0], -1)
                at = 0
                for version, count in row.spans:
                    for place in range(at, at + count):
                        if version != GIVEN:
                            now = every[row.prompt.size + place - 1, tokens[row.prompt.size + place]]
                            ratio = (now - float(row.logprobs[place])).exp()
                            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
                    at += count
            if losses:
                episodes.append(torch.stack(losses))
    if kind == "token-mean":
        return torch.cat(episodes).mean()
    if kind == "sequence-mean":
        return torch.stack([each.mean() for each in episodes]).mean()
    return torch.stack([each.sum() / LONGEST for each in episodes]).mean()


@pytest.mark.parametrize("kind", ["token-mean", "sequence-mean", "fixed-length"])
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_episodes_is_that_of_plain_loops(base: Any, kind: Kind, seed: int) -> None:
    """miles #2378: an episode with more branches weighed more, in the baseline and in the loss."""
    groups = random_groups(seed)
    options = TrainerOptions(
        1,
        "grpo",
        "ppo",
        correction="none",
        aggregation=kind,
        max_tokens=LONGEST,
        clip_norm=1e9,
        micro_tokens=40,
        learning_rate=1e-3,
    )
    trainer = Trainer(copy.deepcopy(base), options, version=1)
    gradients: list[torch.Tensor] = []
    trainer.optimiser.register_step_pre_hook(
        lambda *_: gradients.extend(each.grad.clone() for each in trainer.parameters if each.grad is not None)
    )
    for group in groups:
        trainer.feed(1, [group])
    report = trainer.finish(1)
    model = copy.deepcopy(base)
    loss = plain_loss(model, groups, kind)
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    for one, other in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(one, other.grad, rtol=1e-5, atol=1e-7)
    rewards = {row.episode: row.reward for group in groups for row in group}
    assert report.reward == pytest.approx(np.mean(list(rewards.values())))
    assert report.tokens == sum(row.made for group in groups for row in group)
    assert sum(report.token_staleness.values()) == report.tokens


def test_given_tokens_have_no_age(base: Any) -> None:
    row = Row.of("p0/0", [1], [2, 3, 4], [0, -1, -1], ((GIVEN, 1), (3, 2)), 1.0, "p0/0")
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(1), version=4)
    trainer.feed(4, [[row, row]])
    assert trainer.finish(4).max_staleness == 1
    with pytest.raises(StalenessError, match="2 tokens of version 3"):
        trainer.feed(5, [[row, row]])


def test_a_step_of_nothing_but_truncated_episodes_changes_nothing(base: Any) -> None:
    random = np.random.default_rng(0)
    rows = [random_row(f"p0/{at}", float(at), True, random) for at in range(3)]
    trainer = Trainer(copy.deepcopy(base), TrainerOptions(1), version=1)
    trainer.feed(1, [rows])
    report = trainer.finish(1)
    assert report.updates == 0
    assert all(torch.equal(one, other) for one, other in zip(base.parameters(), trainer.parameters, strict=True))
