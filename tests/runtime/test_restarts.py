"""Restarts are limited by rate: a long run survives any number of rare deaths, and one that starts in vain ends."""

from hypothesis import given
from hypothesis import strategies as st

from staleflow.runtime.restarts import MOST, SOON_S, WITHIN_S, Restarts


def test_a_week_long_run_does_not_end_at_its_fifth_death() -> None:
    restarts = Restarts()
    for death in range(1, 1000):
        restarts.started("i0", (death - 1) * 200.0)
        assert restarts.died("i0", death * 200.0) == 0.0


def test_one_that_dies_at_once_waits_longer_each_time_and_is_then_given_up() -> None:
    restarts, now, waits = Restarts(), 0.0, []
    while True:
        restarts.started("i0", now)
        wait = restarts.died("i0", now + 1)
        if wait is None:
            break
        waits.append(wait)
        now += 1 + wait
    assert waits == sorted(waits)
    assert len(waits) == MOST


def test_one_that_dies_again_and_again_gets_no_work_before_it_has_stayed_up() -> None:
    """It was given the work of the others as soon as it was back, only to lose it again."""
    restarts = Restarts()
    assert restarts.trusted("i0", 0.0)
    trials: list[float] = []
    for death in range(4):
        restarts.started("i0", 100.0 * death)
        restarts.died("i0", 100.0 * death + SOON_S - 1)
        trials.append(next(up_s for up_s in range(100) if restarts.trusted("i0", up_s)))
    assert trials[0] == 0
    assert trials == sorted(set(trials)), "longer each time"
    restarts.started("i0", 1000.0)
    restarts.died("i0", 1000.0 + SOON_S + 1)
    assert restarts.trusted("i0", 0.0), "it had run well"


def test_each_process_is_counted_by_itself() -> None:
    restarts = Restarts()
    for name in ("i0", "i1", "trainer"):
        for at in range(MOST):
            restarts.started(name, float(at))
            assert restarts.died(name, at + 0.5) is not None
        assert restarts.died(name, 10.0) is None


@given(st.lists(st.floats(0.0, 2000.0), max_size=40).map(sorted))
def test_it_is_given_up_exactly_when_too_many_deaths_fall_into_the_time_that_counts(deaths: list[float]) -> None:
    restarts = Restarts()
    for at, now in enumerate(deaths):
        recent = [each for each in deaths[: at + 1] if each > now - WITHIN_S]
        assert (restarts.died("i0", now) is None) == (len(recent) > MOST)
