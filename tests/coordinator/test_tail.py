"""The tail: acts only on what the step waits for, and only when it is stuck on little for long."""

from dataclasses import replace

import pytest

from staleflow.coordinator.situation import Abort, Pace, Resident, Situation, Truncate
from staleflow.coordinator.strategies import TAIL, Strategies
from tests.coordinator.make_situations import decided, instance, situation, started

REPLACE, TRUNCATE = Strategies(tail="replace"), Strategies(tail="truncate")


def stuck(groups: int) -> Situation:
    blockers = [Resident(f"{at}.{member}", f"g{at}", 0, 900, 400, 0) for at in range(groups) for member in (0, 1)]
    return situation([instance("i")], pace=Pace(step_s=20.0), blockers=blockers, blocked_since=90.0)


def test_wait_ends_nothing() -> None:
    assert decided(TAIL, stuck(1), Strategies(tail="wait")) == []


def test_replace_gives_up_each_group_once() -> None:
    assert decided(TAIL, stuck(2), REPLACE) == [Abort("g0", "tail"), Abort("g1", "tail")]


def test_truncate_ends_each_unfinished_trajectory() -> None:
    assert decided(TAIL, stuck(1), TRUNCATE) == [Truncate("0.0", "i"), Truncate("0.1", "i")]


@pytest.mark.parametrize("mode", TAIL.entries)
def test_a_step_that_waits_for_much_or_not_for_long_is_left_alone(mode: str) -> None:
    strategies = Strategies(tail=mode)  # type: ignore[arg-type]
    one = stuck(1)
    for other in (
        stuck(0),
        stuck(5),
        replace(one, blocked_since=90.1),
        replace(one, blocked_since=None),
        replace(one, pace=Pace()),
    ):
        assert decided(TAIL, other, strategies) == []


def test_age_alone_is_no_reason_to_throw_anything_away() -> None:
    one = replace(stuck(0), queue=started("interrupted long ago", 0, 9_000), newest=50)
    assert decided(TAIL, one, REPLACE) == decided(TAIL, one, TRUNCATE) == []
