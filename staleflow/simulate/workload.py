"""How long prompts and responses are: a frozen description, and lengths that depend on nothing but it and the index.

``length`` is a pure function: whatever the policy does, in whatever order, sample 3 of prompt 7 has the same length,
so policies are compared on the same work. A second attempt at a sample is a new draw. The version a sample is
generated with changes its length by ``drift`` alone, never the draw.

    workload = Workload(Sampled(Lognormal.from_mean(1500, cv=1.5), between=0.7, seed=1), max_tokens=20_000)
    workload.length(prompt_index=7, sample_index=3, attempt=0, version=2)
    Workload(read_trace("lengths.csv.gz")).mean_tokens()
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from staleflow.simulate.lengths import (
    Constant,
    Distribution,
    require,
    require_between,
    require_positive,
)
from staleflow.simulate.randomness import Keyed

NO_CAP = 1 << 20
"""Longer than any response, yet it keeps the mean of a heavy tail finite."""

_LARGEST_U = 1 - 2.0**-53
_ROOT_HALF = math.sqrt(0.5)


class Source(Protocol):
    """Lengths before scale, drift and cap."""

    def length(self, prompt: int, sample: int, attempt: int) -> float: ...

    def prompt_length(self, prompt: int) -> float: ...

    def weighted_lengths(self) -> Iterator[tuple[float, float]]:
        """(share, length) pairs that make up the distribution; the shares sum to 1."""
        ...

    def weighted_prompt_lengths(self) -> Iterator[tuple[float, float]]: ...

    def with_seed(self, seed: int) -> "Source": ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Lengths drawn from a distribution, alike within a prompt to the degree ``between``.

    ``between`` is the share of the variance of the underlying normal score that lies between prompts: 0 makes all
    samples independent, 1 gives every sample of a prompt the same length. The distribution over all samples is
    ``output`` either way (a Gaussian copula).
    """

    output: Distribution
    prompt: Distribution = field(default_factory=lambda: Constant(512))
    between: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_between("between", self.between, 0, 1)

    def length(self, prompt: int, sample: int, attempt: int) -> float:
        z = math.sqrt(1 - self.between) * Keyed(self.seed).normal("sample length", prompt, sample, attempt)
        if self.between:
            z += math.sqrt(self.between) * _prompt_score(self.seed, prompt)
        return self.output.quantile(_normal_cdf(z))

    def prompt_length(self, prompt: int) -> float:
        return self.prompt.quantile(Keyed(self.seed).uniform("prompt length", prompt))

    def weighted_lengths(self) -> Iterator[tuple[float, float]]:
        return _weighted_quantiles(self.output)

    def weighted_prompt_lengths(self) -> Iterator[tuple[float, float]]:
        return _weighted_quantiles(self.prompt)

    def with_seed(self, seed: int) -> "Sampled":
        return replace(self, seed=seed)


@dataclass(frozen=True, slots=True)
class Workload:
    """Output lengths are ``source`` x ``scale`` x (1 + ``drift``) ** version, rounded, from 1 to ``max_tokens``.

    The cap truncates, as an engine's token limit does: a length of ``max_tokens`` is a response that was cut off.
    """

    source: Source
    max_tokens: int = NO_CAP
    scale: float = 1.0
    drift: float = 0.0

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "a whole number from 1 upwards")
        require_positive("scale", self.scale)
        require(-1 < self.drift < 1, "drift", self.drift, "the relative change per version, such as 0.01")

    def length(self, prompt_index: int, sample_index: int, attempt: int = 0, version: int = 0) -> int:
        """Output tokens of one trajectory."""
        return self._tokens(self.source.length(prompt_index, sample_index, attempt), version)

    def prompt_tokens(self, prompt_index: int) -> int:
        return max(1, round(self.source.prompt_length(prompt_index)))

    def mean_tokens(self, version: int = 0) -> float:
        """Expected output tokens of a trajectory. Sums over the whole distribution: call it once, not per event."""
        return math.fsum(share * tokens for share, tokens in self.spread(version))

    def spread(self, version: int = 0) -> Iterator[tuple[float, int]]:
        """The whole distribution of output tokens as (share, tokens)."""
        return ((share, self._tokens(raw, version)) for share, raw in self.source.weighted_lengths())

    def mean_prompt_tokens(self) -> float:
        return math.fsum(share * max(1, round(raw)) for share, raw in self.source.weighted_prompt_lengths())

    def with_seed(self, seed: int) -> "Workload":
        """The same distribution, other draws. A trace has no draws and stays as it is."""
        return replace(self, source=self.source.with_seed(seed))

    def _tokens(self, raw: float, version: int) -> int:
        tokens = raw * self.scale
        if self.drift:
            # As exp() with a bound, because a power of a long run would overflow; the cap is reached long before.
            tokens *= math.exp(min(version * math.log1p(self.drift), 100.0))
        return self.max_tokens if tokens >= self.max_tokens else max(1, round(tokens))


@lru_cache(maxsize=1 << 16)
def _prompt_score(seed: int, prompt: int) -> float:
    """Shared by all samples of a prompt, which are mostly asked for together."""
    return Keyed(seed).normal("prompt score", prompt)


def _normal_cdf(z: float) -> float:
    return min(0.5 * math.erfc(-z * _ROOT_HALF), _LARGEST_U)


def _weighted_quantiles(distribution: Distribution, points: int = 20_000) -> Iterator[tuple[float, float]]:
    """Midpoints in the normal score rather than in u: they reach 1e-15 into both tails, where heavy tails weigh."""
    edge = 8.0
    below = _normal_cdf(-edge)
    whole = 1 - 2 * below
    for i in range(1, points + 1):
        upper = _normal_cdf(edge * (2 * i / points - 1))
        yield (upper - below) / whole, distribution.quantile((upper + below) / 2)
        below = upper
