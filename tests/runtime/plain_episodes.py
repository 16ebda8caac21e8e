"""A plain synchronous loop over episodes of several turns: what a run with bound 0 must equal."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from staleflow.rollout.sampling import uniform
from staleflow.workers.rollout import draw_seed


@dataclass
class Plain:
    folder: Path
    prompt: Callable[[int], list[int]]
    first: list[int]
    """Given before the first turn."""
    answer: Callable[[list[int]], list[int]]
    """Given after a turn."""
    reward: Callable[[list[int]], float]
    turns: int
    groups: int
    size: int
    limit: int
    """Tokens of a turn."""
    end: int
    rate: float
    seed: int


Episode = tuple[list[int], list[bool], list[float]]
"""Tokens, which of them were made, and the log-probabilities of those."""


def train(plain: Plain, steps: int) -> tuple[list[float], list[dict[str, list[int]]], Any]:
    """Losses, the tokens of each step's episodes, and the model in the end."""
    model = LlamaForCausalLM.from_pretrained(plain.folder)
    optimiser = torch.optim.AdamW(model.parameters(), lr=plain.rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    batches: list[dict[str, list[int]]] = []
    for step in range(steps):
        numbers = range(step * plain.groups, (step + 1) * plain.groups)
        batch = {n: [episode(plain, model, n, f"p{n}/{at}") for at in range(plain.size)] for n in numbers}
        losses.append(update(plain, model, optimiser, batch))
        batches.append({f"p{n}/{at}": each[0] for n, members in batch.items() for at, each in enumerate(members)})
    return losses, batches, model


@torch.no_grad()
def episode(plain: Plain, model: Any, number: int, name: str) -> Episode:
    seed = np.array([draw_seed(plain.seed, name)], np.uint64)
    tokens, made, logprobs = list[int](), list[bool](), list[float]()
    given = plain.first
    for _ in range(plain.turns):
        tokens, made = tokens + given, made + [False] * len(given)
        turn: list[int] = []
        while len(turn) < plain.limit and (not turn or turn[-1] != plain.end):
            probs = model(input_ids=torch.tensor([plain.prompt(number) + tokens])).logits[0, -1].softmax(-1)
            cumulated = probs.double().cumsum(-1)
            share = float(uniform(seed, np.array([len(logprobs)]))[0]) * cumulated[-1]
            turn.append(int((cumulated <= share).sum()))
            tokens, made = [*tokens, turn[-1]], [*made, True]
            logprobs.append(float(probs[turn[-1]].log()))
        given = plain.answer(turn)
    return tokens, made, logprobs


def update(plain: Plain, model: Any, optimiser: Any, batch: dict[int, list[Episode]]) -> float:
    """GRPO with the DAPO loss: a mean over the made tokens of all groups that have a signal."""
    total, count = torch.zeros(()), 0
    for number, members in batch.items():
        made = [[token for token, is_made in zip(each[0], each[1], strict=True) if is_made] for each in members]
        rewards = torch.tensor([plain.reward(each) for each in made], dtype=torch.float64)
        if len(set(rewards.tolist())) == 1:
            continue
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for (tokens, is_made, behaviour), advantage in zip(members, advantages.float(), strict=True):
            prompt = plain.prompt(number)
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            every = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            ratio = (every[torch.tensor(is_made)] - torch.tensor(behaviour)).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
            count += len(behaviour)
    loss = total / count
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item()
