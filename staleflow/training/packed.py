"""Packed sequences, and sums over them that add up chunk by chunk.

Tokens of all sequences lie one behind the other without padding. Shape suffixes: T generated tokens, N sequences,
G groups, V vocabulary. A loss is kept as a sum with its counts (``LossSum``): the trainer calls backward on the sum of
each chunk as it arrives, and scales the accumulated gradients once the last one came, when the normaliser is known::

    for chunk in chunks:
        loss = ppo_clip(logprobs_T, advantages_T, segments, correction, TOKEN_MEAN)
        loss.total.backward()
        step = step + loss.detach()                 # from LossSum.zero(TOKEN_MEAN) on
    scale_gradients(model.parameters(), step.scale)

The promise: gradients scaled so are those of the whole batch's loss, up to rounding, however it was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from staleflow.training.options import AggregationKind


@dataclass(frozen=True)
class Segments:
    """Which tokens belong to which sequence: the first ``lengths_N[0]`` to the first, and so on."""

    lengths_N: Tensor
    tokens: int
    """T, known without asking the device."""
    wholes_N: Tensor | None = None
    """Where a sequence may be a branch of an episode: tokens of the whole episode. It then weighs as its part."""
    episodes: float | None = None
    """How many episodes the parts make up."""

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray | Tensor, device: torch.device | str | None = None) -> Segments:
        """From the count of generated tokens of each sequence."""
        lengths_N = torch.as_tensor(lengths, device=device)
        if lengths_N.ndim != 1 or lengths_N.numel() == 0:
            raise ValueError("the batch is empty: give the length of at least one sequence, as a flat list")
        if lengths_N.is_floating_point() or lengths_N.dtype == torch.bool:
            raise ValueError(f"lengths are {lengths_N.dtype}: give whole numbers of tokens")
        if (least := int(lengths_N.min())) < 1:
            raise ValueError(f"sequence {int(lengths_N.argmin())} has {least} tokens: leave it out of the batch")
        return cls(lengths_N.long(), int(lengths_N.sum()))

    @property
    def sequences(self) -> int:
        return self.lengths_N.numel()

    @cached_property
    def rows_T(self) -> Tensor:
        """The sequence each token belongs to."""
        return torch.repeat_interleave(self.lengths_N, output_size=self.tokens)

    @cached_property
    def ends_N(self) -> Tensor:
        """One past the last token of each sequence."""
        return self.lengths_N.cumsum(0)

    def spread(self, values_N: Tensor) -> Tensor:
        """Each sequence's value at each of its tokens, on the device of the tokens."""
        self.check_sequences(values=values_N)
        return values_N.to(self.lengths_N.device)[self.rows_T]

    def sum(self, values_T: Tensor) -> Tensor:
        """Over the tokens of each sequence. Differentiable, and in a fixed order on every device."""
        self.check_tokens(values=values_T)
        return torch.segment_reduce(values_T, "sum", lengths=self.lengths_N, unsafe=True)

    def mean(self, values_T: Tensor) -> Tensor:
        return self.sum(values_T) / self.lengths_N

    def check_tokens(self, **named_T: Tensor) -> None:
        for name, values_T in named_T.items():
            _check_shape(name, values_T, self.tokens, "token")

    def check_sequences(self, **named_N: Tensor) -> None:
        for name, values_N in named_N.items():
            _check_shape(name, values_N, self.sequences, "sequence")


def _check_shape(name: str, values: Tensor, count: int, of: str) -> None:
    if values.shape != (count,):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but the batch has {count} {of}s: give one value per {of}, flat"
        )


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How the losses l of tokens become one number; |o| is the length of a sequence, N their count.

    ``token-mean``      sum_i sum_t l / sum_i |o_i|              every token weighs the same (DAPO)
    ``sequence-mean``   sum_i (sum_t l / |o_i|) / N              every sequence weighs the same (GRPO, GSPO)
    ``fixed-length``    sum_i sum_t l / (N * length)             no bias by length (Dr. GRPO)

    All branches of an episode together are one sequence in this: opening a branch adds no weight.
    """

    kind: AggregationKind
    length: int | None = None
    """The constant of ``fixed-length``: most tokens that a sequence may have."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(AggregationKind):
            raise ValueError(f"aggregation {self.kind!r} is unknown: use {', '.join(get_args(AggregationKind))}")
        if (self.kind == "fixed-length") != (self.length is not None):
            raise ValueError(f"aggregation {self.kind} with length={self.length}: only fixed-length takes a length")
        if self.length is not None and self.length < 1:
            raise ValueError(f"length={self.length}: give fixed-length the most tokens that a sequence may have")

    def normaliser(self, tokens: int, sequences: float) -> float:
        """What the sum is divided by, when all tokens and sequences of the step are counted."""
        if self.kind == "token-mean":
            return tokens
        return sequences if self.length is None else sequences * self.length


TOKEN_MEAN = Aggregation("token-mean")
SEQUENCE_MEAN = Aggregation("sequence-mean")


@dataclass(frozen=True)
class Metrics:
    """Numbers about a chunk that add up: means as (sum, weight), and peaks.

    They stay on the device until ``values`` is called, so that measuring does not wait for it.
    """

    sums: Mapping[str, tuple[Tensor, Tensor | int]] = field(default_factory=dict)
    peaks: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Metrics) -> Metrics:
        """Of both chunks together. A name that only one has is kept as it is."""
        sums, peaks = dict(self.sums), dict(self.peaks)
        for name, (total, weight) in other.sums.items():
            mine, counted = sums.get(name, (0, 0))
            sums[name] = (mine + total, counted + weight)
        for name, peak in other.peaks.items():
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak
        return Metrics(sums, peaks)

    def values(self) -> dict[str, float]:
        """The means and peaks; 0 where nothing was counted."""
        numbers = [number for pair in self.sums.values() for number in pair] + list(self.peaks.values())
        found = iter(_together(numbers))
        pairs = [(name, next(found), next(found)) for name in self.sums]
        means = {name: total / weight if weight else 0.0 for name, total, weight in pairs}
        return means | dict(zip(self.peaks, found, strict=True))


def _together(numbers: Sequence[Tensor | int]) -> list[float]:
    """Numbers, asked of the device once for all."""
    tensors = [each.double() for each in numbers if isinstance(each, Tensor)]
    asked = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(asked) if isinstance(each, Tensor) else float(each) for each in numbers]


@dataclass(frozen=True)
class LossSum:
    """A loss that is not yet divided by its normaliser, with the counts that make it up."""

    total: Tensor
    tokens: int
    """Kept ones: what a correction masks is not counted."""
    sequences: float
    """Whole ones, unless episodes have several branches: these count by their share of the tokens."""
    aggregation: Aggregation
    metrics: Metrics = field(default_factory=Metrics)

    @classmethod
    def zero(cls, aggregation: Aggregation, device: torch.device | None = None) -> LossSum:
        return cls(torch.zeros((), device=device), 0, 0, aggregation)

    def __add__(self, other: LossSum) -> LossSum:
        """The loss of two disjoint chunks."""
        if self.aggregation != other.aggregation:
            raise ValueError(
                f"chunks aggregated by {self.aggregation.kind} and by {other.aggregation.kind} have no common "
                "normaliser: use one aggregation in a step"
            )
        tokens, sequences = self.tokens + other.tokens, self.sequences + other.sequences
        return LossSum(self.total + other.total, tokens, sequences, self.aggregation, self.metrics + other.metrics)

    def plus(self, term: LossSum, coefficient: float) -> LossSum:
        """With another loss of the same tokens: ``total + coefficient * term``. One normaliser serves both."""
        mine, its = (self.tokens, self.sequences, self.aggregation), (term.tokens, term.sequences, term.aggregation)
        if mine != its:
            raise ValueError(
                f"a term over {its[0]} tokens of {its[1]} sequences by {its[2].kind} cannot join a loss over {mine[0]} "
                f"of {mine[1]} by {mine[2].kind}: give both the same keep_N and aggregation"
            )
        return replace(self, total=self.total + coefficient * term.total, metrics=self.metrics + term.metrics)

    def detach(self) -> LossSum:
        """Without its graph, to be kept until the step ends."""
        return replace(self, total=self.total.detach())

    @property
    def normaliser(self) -> float:
        return self.aggregation.normaliser(self.tokens, self.sequences)

    @property
    def scale(self) -> float:
        """What gradients of the total are multiplied by. With everything masked they are 0, and so is this."""
        return 1 / self.normaliser if self.normaliser else 0.0

    @property
    def mean(self) -> Tensor:
        """The loss of everything that was added up."""
        return self.total * self.scale


def scale_gradients(parameters: Iterable[Tensor], scale: float) -> None:
    """Multiply what backward has accumulated, in place."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if gradients:
        cast(Any, torch)._foreach_mul_(gradients, scale)


def aggregate(
    values_T: Tensor,
    segments: Segments,
    aggregation: Aggregation,
    keep_N: Tensor | None = None,
    metrics: Mapping[str, Tensor] | None = None,
    peaks: Mapping[str, Tensor] | None = None,
) -> LossSum:
    """Sum the losses of kept tokens; metrics are given per token and averaged over the kept ones."""
    segments.check_tokens(losses=values_T)
    tokens, wholes_N = segments.tokens, segments.wholes_N
    sequences = segments.sequences if segments.episodes is None else segments.episodes
    kept_T: Tensor | None = None
    if keep_N is not None:
        segments.check_sequences(keep=keep_N)
        kept_T = segments.spread(keep_N)
        shares_N = keep_N if wholes_N is None else torch.where(keep_N, segments.lengths_N / wholes_N, 0)
        tokens, sequences = int(kept_T.sum()), shares_N.sum().item()
    sizes_N = segments.lengths_N if wholes_N is None else wholes_N
    total_T = values_T / segments.spread(sizes_N) if aggregation.kind == "sequence-mean" else values_T
    sums: dict[str, tuple[Tensor, Tensor | int]] = {
        name: (_kept(each_T.detach(), kept_T).sum(), tokens) for name, each_T in (metrics or {}).items()
    }
    tops = {name: _kept(each_T.detach(), kept_T).max() for name, each_T in (peaks or {}).items()}
    return LossSum(_kept(total_T, kept_T).sum(), tokens, sequences, aggregation, Metrics(sums, tops))


def _kept(values_T: Tensor, kept_T: Tensor | None) -> Tensor:
    # Selected, not multiplied by 0: a masked infinity must not become NaN.
    return values_T if kept_T is None else torch.where(kept_T, values_T, 0)
