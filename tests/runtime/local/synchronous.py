"""A plain synchronous loop: sample a batch, train on it, again. What a run with bound 0 must equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from staleflow.rollout.sampling import uniform
from staleflow.workers.rollout import draw_seed


@dataclass
class Plain:
    folder: Path
    prompt: Callable[[int], Sequence[int]]
    reward: Callable[[int, list[int]], float]
    groups: int
    group_size: int
    max_tokens: int
    end: int
    learning_rate: float
    warmup: int
    seed: int


def train(plain: Plain, steps: int) -> tuple[list[float], list[list[list[int]]]]:
    """The loss of each step, and the lengths of its responses, group by group."""
    model = LlamaForCausalLM.from_pretrained(plain.folder)
    optimiser = torch.optim.AdamW(model.parameters(), lr=plain.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses, batches = [], []
    for step in range(steps):
        batch = [sample_group(plain, model, step * plain.groups + at) for at in range(plain.groups)]
        for each in optimiser.param_groups:
            each["lr"] = plain.learning_rate * min(1.0, (step + 1) / plain.warmup)
        losses.append(update(plain, model, optimiser, batch))
        batches.append([[len(tokens) for tokens, _ in responses] for _, responses in batch])
    return losses, batches


def sample_group(plain: Plain, model, number: int):
    prompt = list(plain.prompt(number))
    members = [sample(plain, model, prompt, f"p{number}/{member}") for member in range(plain.group_size)]
    return number, members


@torch.no_grad()
def sample(plain: Plain, model, prompt: list[int], name: str) -> tuple[list[int], list[float]]:
    seed = np.array([draw_seed(plain.seed, name)], np.uint64)
    tokens, logprobs, past = [], [], None
    inputs = prompt
    while len(tokens) < plain.max_tokens and (not tokens or tokens[-1] != plain.end):
        out = model(input_ids=torch.tensor([inputs]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        probs = out.logits[0, -1].softmax(-1)
        cumulated = probs.double().cumsum(-1)
        share = float(uniform(seed, np.array([len(tokens)]))[0]) * cumulated[-1]
        token = int((cumulated <= share).sum())
        tokens.append(token)
        logprobs.append(float(probs[token].log()))
        inputs = [token]
    return tokens, logprobs


def update(plain: Plain, model, optimiser, batch) -> float:
    """GRPO with the DAPO loss: a mean over the tokens of all groups that have a signal."""
    total, count = torch.zeros(()), 0
    for number, members in batch:
        rewards = torch.tensor([plain.reward(number, tokens) for tokens, _ in members], dtype=torch.float64)
        if len(set(rewards.tolist())) == 1:
            continue
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for (tokens, behaviour), advantage in zip(members, advantages.float(), strict=True):
            prompt = list(plain.prompt(number))
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            ratio = (logprobs - torch.tensor(behaviour)).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
            count += len(tokens)
    loss = total / count
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item()
