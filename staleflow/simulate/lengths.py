"""Length distributions, each as its quantile function: ``quantile(u)`` rises with ``u`` in (0, 1) and is positive.

Lengths are real numbers here; ``Workload`` scales, caps and rounds them. An impossible distribution is refused
when it is made, with a ``ConfigError`` that says what to write instead.

    Lognormal.from_mean(1500, cv=1.5).quantile(0.5)   # the median
    servegen_r1_output().quantile(0.99)               # production serving of DeepSeek-R1
"""

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from statistics import NormalDist
from typing import Protocol

from staleflow.errors import ConfigError, shown

LARGEST = 1e12
"""No length or factor needs more, and products of what is below it stay finite."""
_NORMAL_QUANTILE = NormalDist().inv_cdf
_LARGEST_EXPONENT = 100.0  # every cap lies far below exp() of it


def require(holds: bool, name: str, value: object, instead: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {shown(value)}: write {instead}")


def require_between(name: str, value: float, low: float, high: float) -> None:
    require(low <= value <= high, name, value, f"a number from {low:g} to {high:g}")


def require_positive(name: str, value: float) -> None:
    require(0 < value <= LARGEST, name, value, f"a number above 0 and at most {LARGEST:g}")


class Distribution(Protocol):
    def quantile(self, u: float) -> float:
        """The length that a share ``u`` of all lengths does not exceed; 0 < u < 1."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    tokens: float

    def __post_init__(self) -> None:
        require_positive("tokens", self.tokens)

    def quantile(self, u: float) -> float:  # noqa: ARG002 - the protocol's parameter
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float

    def __post_init__(self) -> None:
        require_positive("low", self.low)
        require(self.low <= self.high <= LARGEST, "high", self.high, f"a number from low = {self.low:g} upwards")

    def quantile(self, u: float) -> float:
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """``sigma`` is the standard deviation of log(length)."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        require_positive("median", self.median)
        require_between("sigma", self.sigma, 0, 10)

    @classmethod
    def from_mean(cls, mean: float, cv: float) -> "Lognormal":
        """``cv`` is the coefficient of variation: standard deviation over mean."""
        require_positive("mean", mean)
        require_between("cv", cv, 0, 1000)
        variance = math.log1p(cv * cv)
        return cls(mean * math.exp(-variance / 2), math.sqrt(variance))

    def quantile(self, u: float) -> float:
        return self.median * math.exp(self.sigma * _NORMAL_QUANTILE(u))


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """P(length > x) = (x / minimum) ** -tail. Below ``tail`` 2 the variance, below 1 the mean depends on the cap."""

    minimum: float
    tail: float

    def __post_init__(self) -> None:
        require_positive("minimum", self.minimum)
        require_positive("tail", self.tail)

    def quantile(self, u: float) -> float:
        return self.minimum * math.exp(min(-math.log1p(-u) / self.tail, _LARGEST_EXPONENT))


@dataclass(frozen=True, slots=True)
class Bimodal:
    """A share of long responses among short ones; each mode is uniform within ``spread`` (relative) of its centre."""

    short: float
    long: float
    long_share: float
    spread: float = 0.1

    def __post_init__(self) -> None:
        require_positive("short", self.short)
        require_positive("long", self.long)
        require_between("long_share", self.long_share, 0, 1)
        require(0 <= self.spread < 1, "spread", self.spread, "a number from 0 to below 1")
        least = self.short * (1 + self.spread) / (1 - self.spread)
        require(least <= self.long, "long", self.long, f"at least {least:g}, so that the modes stay apart")

    def quantile(self, u: float) -> float:
        short_share = 1 - self.long_share
        if u < short_share:
            return self.short * (1 + self.spread * (2 * u / short_share - 1))
        return self.long * (1 + self.spread * (2 * (u - short_share) / self.long_share - 1))


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """``values[i]`` is the quantile at ``probabilities[i]``, from 0 to 1 inclusive; straight lines in between."""

    probabilities: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        points, count = self.probabilities, len(self.probabilities)
        require(count >= 2 and count == len(self.values), "the table", count, "as many values as probabilities")
        require(points[0] == 0 and points[-1] == 1, "the range", (points[0], points[-1]), "0 first and 1 last")
        for left, right in pairwise(points):
            require(left < right, "a probability", right, f"one above its predecessor {left}")
        require_positive("a value", self.values[0])
        for left, right in pairwise(self.values):
            require(left <= right <= LARGEST, "a value", right, f"one not below its predecessor {left}")

    def quantile(self, u: float) -> float:
        i = bisect_right(self.probabilities, u)
        left, low = self.probabilities[i - 1], self.values[i - 1]
        return low + (u - left) / (self.probabilities[i] - left) * (self.values[i] - low)


@lru_cache(maxsize=1)
def servegen_r1_output() -> QuantileTable:
    """Output tokens of production DeepSeek-R1 serving; source and licence in the README next to the table."""
    with (files("staleflow.simulate") / "data" / "servegen_r1_output.csv").open(encoding="utf-8") as lines:
        return read_table(lines)


def read_table(lines: Iterable[str]) -> QuantileTable:
    """Read a table from CSV with the columns ``probability`` and ``tokens``."""
    rows = [(float(row["probability"]), float(row["tokens"])) for row in csv.DictReader(lines)]
    return QuantileTable(tuple(p for p, _ in rows), tuple(tokens for _, tokens in rows))
