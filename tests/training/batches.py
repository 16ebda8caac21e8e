"""Random steps of groups, and a model small enough to compare its gradients to the last digit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from staleflow.training.advantages import final_rewards, gae
from staleflow.training.correction import Correction
from staleflow.training.options import ADVANTAGES, CORRECTIONS
from staleflow.training.packed import Aggregation, Segments

FEATURES, VOCABULARY = 4, 5
KNOBS = {"importance_cap": 1.2, "sequence_band": (0.8, 1.3)}
EPS: dict[str, dict[str, float]] = {
    "ppo": {"eps_low": 0.1, "eps_high": 0.2, "dual_clip": 1.4},
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},
    "gspo": {"eps_low": 0.05, "eps_high": 0.1},
    "cispo": {"eps_low": 0.3, "eps_high": 0.2},
}
AGGREGATIONS = [Aggregation("token-mean"), Aggregation("sequence-mean"), Aggregation("fixed-length", 8)]


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def quick(examples: int) -> settings:
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


@dataclass(frozen=True)
class Batch:
    """Sequences of groups, with what a model sees at each token."""

    lengths: list[int]
    groups: list[int]
    rewards_N: Tensor
    features_TF: Tensor
    tokens_T: Tensor
    noise_T: Tensor
    """How far behaviour and reference are from the model."""

    @property
    def segments(self) -> Segments:
        return Segments.of(self.lengths)

    def pick(self, groups: Sequence[int]) -> Batch:
        """These groups, in this order."""
        rows = [i for group in groups for i, its in enumerate(self.groups) if its == group]
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        tokens = [t for i in rows for t in range(ends[i] - self.lengths[i], ends[i])]
        lengths, names = [self.lengths[i] for i in rows], [self.groups[i] for i in rows]
        parts = (self.features_TF[tokens], self.tokens_T[tokens], self.noise_T[tokens])
        return Batch(lengths, names, self.rewards_N[rows], *parts)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.policy = nn.Parameter(torch.randn(FEATURES, VOCABULARY, generator=generator, dtype=dtype))
        self.value = nn.Parameter(torch.randn(FEATURES, generator=generator, dtype=dtype))

    def logits(self, batch: Batch) -> Tensor:
        return batch.features_TF.to(self.policy) @ self.policy

    def logprobs(self, batch: Batch) -> Tensor:
        return self.logits(batch).log_softmax(-1).gather(1, batch.tokens_T[:, None]).squeeze(1)

    def values(self, batch: Batch) -> Tensor:
        return batch.features_TF.to(self.value) @ self.value


def token_entropy(logits_TV: Tensor) -> Tensor:
    log_p_TV = logits_TV.log_softmax(-1)
    return -(log_p_TV.exp() * log_p_TV).sum(-1)


@st.composite
def batches(draw: st.DrawFn, most_groups: int = 4) -> Batch:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most_groups))
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    lengths = draw(st.lists(st.integers(1, 6), min_size=len(groups), max_size=len(groups)))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.1, -0.5]), min_size=len(groups), max_size=len(groups)))
    return make(lengths, groups, rewards, draw(st.integers(0, 2**31)))


def make(lengths: list[int], groups: list[int], rewards: list[float], seed: int = 0) -> Batch:
    generator, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    features_TF = torch.randn(tokens, FEATURES, generator=generator, dtype=torch.float64)
    tokens_T = torch.randint(VOCABULARY, (tokens,), generator=generator)
    noise_T = 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    return Batch(lengths, groups, torch.tensor(rewards, dtype=torch.float64), features_TF, tokens_T, noise_T)


def advantages(kind: str, batch: Batch, model: Model) -> Tensor:
    if kind == "gae":
        rewards_T = final_rewards(batch.rewards_N, batch.segments)
        return gae(rewards_T, model.values(batch).detach(), batch.segments, lam=0.9).advantages_T
    advantage = ADVANTAGES.load(kind)
    return batch.segments.spread(advantage(batch.rewards_N, torch.tensor(batch.groups), batch.segments))


def correction(kind: str, proximal_T: Tensor, behaviour_T: Tensor, segments: Segments) -> Correction:
    return CORRECTIONS.bound(kind, KNOBS, {})(proximal_T, behaviour_T, segments)
