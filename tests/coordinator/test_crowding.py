"""Instances become as full as the longest trajectories and the memory can bear, as soon as these are known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.coordinator.crowding import MARGIN, fitting_mu, gain_at
from staleflow.coordinator.decide import decide
from staleflow.coordinator.situation import Pace, Route, Situation
from staleflow.coordinator.strategies import Strategies
from staleflow.runtime.situate import Gauge
from tests.coordinator.make_situations import COST, fresh, instance, situation

PACE = Pace(step_s=100.0, mean_tokens=1_000, grown_tokens=1_500, longest_tokens=10_000)


def filled(pace: Pace, batch_size: int = 100, kv_free: int = 2_000_000, **strategies: object) -> int:
    """How many trajectories one empty instance is given."""
    queue = [each for group in range(200) for each in fresh(f"g{group}", 500, 500)]
    found = situation([instance("i", kv_free=kv_free)], queue, {1: 200}, pace=pace, batch_size=batch_size)
    commands = decide(found, Strategies(**strategies)).commands  # pyright: ignore[reportArgumentType]
    return sum(isinstance(command, Route) for command in commands)


def given_one(pace: Pace = PACE, **more: object) -> Situation:
    return replace(situation([instance("i")], fresh("g", 500), {1: 1}, pace=pace, batch_size=100), **more)


def test_until_lengths_are_known_the_configured_gain_counts() -> None:
    assert fitting_mu(given_one(Pace()), 0.3) is None
    assert fitting_mu(given_one(batch_size=0), 0.3) is None
    assert fitting_mu(given_one(queue=[]), 0.3) is None, "nothing fresh waits"
    assert filled(Pace(), mu=0.9) < filled(Pace(), mu=0.3)
    assert filled(PACE, 400, mu=0.9) == filled(PACE, 400, mu=0.3)
    assert filled(PACE, mu=0.9, adapt=False) == filled(Pace(), mu=0.9)


def test_longer_trajectories_make_instances_emptier_and_larger_batches_fuller() -> None:
    assert filled(replace(PACE, longest_tokens=20_000), 400) < filled(PACE, 400) < filled(PACE, 800)


def test_what_gains_as_much_as_configured_is_started_however_long_the_longest() -> None:
    assert fitting_mu(given_one(replace(PACE, longest_tokens=10**9)), 0.3) == 0.3


def test_no_more_are_started_than_memory_holds_when_they_have_grown() -> None:
    roomy, tight = filled(PACE, 400), filled(PACE, 400, kv_free=60_000)
    assert tight < roomy
    assert tight * 2_000 <= 2 * 60_000


def test_the_even_number_makes_fleet_and_tail_equally_slow() -> None:
    roomy = situation([instance("i", kv_free=10**7)]).fleet
    mu = fitting_mu(given_one(max_staleness=3, batch_size=400, fleet=roomy), 0.3)
    even = 400 * 2 * 1_000 * 4 / 10_000  # groups x members x mean x (bound + 1) / longest, on one instance
    assert mu == gain_at(COST, MARGIN * even, 500, 1_500)
    step = COST.step(int(even), int(even * 2_000))
    assert 400 * 2 * 1_000 * step / even == pytest.approx(10_000 * step / 4)


@given(running=st.floats(1, 500), prompt=st.integers(1, 5_000), grown=st.floats(0, 20_000))
def test_a_fuller_instance_gains_less_and_mu_is_a_share(running: float, prompt: int, grown: float) -> None:
    gain, less = gain_at(COST, running, prompt, grown), gain_at(COST, running + 10, prompt, grown)
    assert 0 <= less <= gain <= 1


def test_lengths_are_those_of_whole_versions_since_short_ones_end_first() -> None:
    gauge = Gauge(pull_s=1.0)
    gauge.begin(0.0, version=0)
    for tokens in (10, 20):
        gauge.finished(tokens, version=0)
    gauge.committed(50.0, version=1, max_staleness=1)
    assert gauge.pace().mean_tokens == 0.0, "version 0 may still be running"
    gauge.finished(60, version=0)
    gauge.finished(1, version=1)
    gauge.committed(100.0, version=2, max_staleness=1)
    pace = gauge.pace()
    assert (pace.step_s, pace.mean_tokens, pace.longest_tokens) == (50.0, 30.0, 60.0)
    assert pace.grown_tokens == pytest.approx((100 + 400 + 3600) / (2 * 90))


def test_the_first_step_is_timed_from_the_start_of_training_and_not_from_the_start_of_the_machine() -> None:
    """In a real run, tails had half a day of patience until twenty steps later."""
    gauge = Gauge(pull_s=1.0)
    gauge.begin(24_000.0, version=7)
    gauge.committed(24_003.0, version=8, max_staleness=1)
    assert gauge.pace().step_s == 3.0
