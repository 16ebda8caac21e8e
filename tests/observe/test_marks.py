import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.observe.marks import ASCII, UNICODE, Glyphs, bar, decimal, duration, number, percent, spark

any_float = st.floats()
glyphs = st.sampled_from([UNICODE, ASCII])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (999, "999"), (999.6, "1.00k"), (1234, "1.23k"), (99_960, "100k"), (1.5e7, "15.0M"), (-1234, "-1.23k")],
)
def test_large_numbers_stay_short(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0, "0:00"), (59.6, "1:00"), (192, "3:12"), (3727, "1:02:07"), (273_600, "3d 04:00"), (-1, "0:00")],
)
def test_durations_read_like_a_clock(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(None, "-"), (math.nan, "-"), (0, "0 %"), (0.003, "0.3 %"), (0.0996, "10 %"), (1, "100 %")]
)
def test_small_shares_are_not_rounded_to_nothing(share: float | None, shown: str) -> None:
    assert percent(share) == shown


def test_bars_and_sparklines_by_example() -> None:
    assert bar(0.5, 4) == ("██", "··")
    assert bar(0.3, 4) == ("█▎", "··")
    assert bar(1e-9, 4) == ("▏", "···")
    assert bar(2.0, 3, ASCII) == ("###", "")
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([5, 5], 8) == "▁▁"
    assert spark([0.0, math.nan, 1.0], 8, 0, 1) == "▁ █"
    assert spark([9, 0, 1], 2) == "▁█"
    assert spark([], 8) == ""


@given(any_float, st.integers(0, 50), glyphs)
def test_a_bar_fills_its_width_for_any_number(share: float, width: int, marks: Glyphs) -> None:
    full, empty = bar(share, width, marks)
    assert len(full) + len(empty) == width


@given(st.lists(any_float, max_size=30), st.integers(-2, 20), glyphs)
def test_a_sparkline_has_one_character_per_value_for_any_numbers(
    values: list[float], width: int, marks: Glyphs
) -> None:
    assert len(spark(values, width, glyphs=marks)) == min(len(values), max(0, width))


@given(any_float)
def test_any_number_can_be_shown(value: float) -> None:
    for shown in (number(value), percent(value), duration(value), decimal(value)):
        assert shown
        assert shown.isascii()
