"""Sections refuse what is outside of the limits that stand in their types, and nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.errors import ConfigError
from staleflow.settings import LARGEST, Amount, Count, Device, Positive, Range, Section, Share


@dataclass(frozen=True)
class Base(Section):
    count: Count = 1
    share: Share | None = None
    amount: Amount = 0.0


@dataclass(frozen=True)
class Whole(Base):
    positive: Positive = 1.0
    pair: tuple[float, float] = (0.0, 1.0)
    unbounded: Annotated[float, Range(0, infinite=True)] = inf
    kind: Literal["a", "b"] = "a"
    device: Device = "cpu"

    def contradictions(self) -> Iterator[str]:
        if self.count == 7 and self.kind == "b":
            yield "count=7 does not go with kind=b: give another"


NUMBERS = st.floats() | st.integers(-3, 3).map(float) | st.integers().map(float)


@given(count=st.integers(), share=st.none() | NUMBERS, amount=NUMBERS, positive=NUMBERS, low=NUMBERS, unbounded=NUMBERS)
def test_a_section_can_be_made_exactly_inside_its_limits(
    count: int, share: float | None, amount: float, positive: float, low: float, unbounded: float
) -> None:
    inside = (
        1 <= count <= LARGEST
        and (share is None or 0 <= share <= 1)
        and (isfinite(amount) and amount >= 0)
        and (isfinite(positive) and positive > 0)
        and isfinite(low)
        and unbounded >= 0
    )
    given = (count, share, amount, positive, (low, 1.0), unbounded)
    if not inside:
        with pytest.raises(ConfigError, match=r"^[^\n]+$"):
            Whole(*given)
        return
    made = Whole(*given)
    assert made.to(Base) == Base(count, share, amount)
    assert made.to(Base, count=3).count == 3


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"count": 0}, "count=0 is too low: give 1 or more"),
        ({"share": 1.5}, "share=1.5 is too high: give at most 1"),
        ({"pair": (0.0, inf)}, "pair=inf is not finite: give a number"),
        ({"kind": "c"}, "kind=c: write one of a, b"),
        ({"device": "cuda:x"}, "device=cuda:x is unknown: give cpu, cuda or cuda:0"),
        ({"count": 7, "kind": "b"}, "count=7 does not go with kind=b: give another"),
        ({"count": 10**30}, f"is out of range: give at most {LARGEST}"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_fix(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        Whole(**given)  # type: ignore[arg-type]
    assert line in str(error.value)
