"""Where the longest trajectories set the pace, fresh work does not wait until it is worth its place."""

from dataclasses import replace

from staleflow.coordinator.decide import decide
from staleflow.coordinator.situation import Pace, Route
from staleflow.coordinator.strategies import Strategies
from staleflow.runtime.situate import Gauge
from tests.coordinator.situations import fresh, instance, situation

LOADED = situation([instance("i", running=60, context=120_000)], fresh("g", 500), {1: 1})


def routed(pace: Pace, strategies: Strategies) -> int:
    decision = decide(replace(LOADED, pace=pace, max_staleness=2), strategies)
    return sum(isinstance(command, Route) for command in decision.commands)


def test_fresh_work_waits_for_its_gain_unless_the_tail_sets_the_pace() -> None:
    throughput, tail = Pace(step_s=100.0, tail_s=200.0), Pace(step_s=100.0, tail_s=290.0)
    assert routed(throughput, Strategies(mu=0.5)) == 0
    assert routed(tail, Strategies(mu=0.5)) == 1
    assert routed(tail, Strategies(mu=0.5, adapt=False)) == 0
    assert routed(Pace(), Strategies(mu=0.5)) == 0, "nothing is known at the start"


def test_the_tail_is_measured_from_publishing_a_version_to_its_last_trajectory() -> None:
    gauge = Gauge(pull_s=1.0)
    gauge.finished(10, version=0, now=40.0)
    gauge.committed(50.0, version=1, max_staleness=1)
    gauge.finished(10, version=0, now=90.0)
    assert gauge.pace().tail_s == 0.0, "version 0 may still be running"
    gauge.committed(100.0, version=2, max_staleness=1)
    assert (gauge.pace().tail_s, gauge.pace().step_s) == (90.0, 50.0)
