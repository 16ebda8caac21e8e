"""How often an instance says something: tokens less often where there are many instances, a sign of life always."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.rollout.engine import StepOutput
from staleflow.workers.link import Gone
from staleflow.workers.rollout import LONGEST_STREAM_S, STREAM_S, STREAMING, serve, stream_s

STEP_S = 0.25


class Engine:
    busy = True


class Busy:
    """A worker on which nothing ever ends, and its link, on one clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine = Engine()
        self.urgent, self.pulling = False, None
        self.said: list[tuple[float, bool]] = []
        """When, and whether with all tokens."""

    def step(self) -> StepOutput:
        self.now += STEP_S
        return StepOutput([], [], [], made=1, context=100)

    def report(self, everything: bool, *_: Any, alive: bool) -> Any:
        assert alive
        self.said.append((self.now, everything))
        return self

    def send(self, _message: Any) -> None: ...

    def receive(self, _wait: float) -> list[Any]:
        if self.now > 200.0:
            raise Gone
        return []


def said(every_s: float) -> list[tuple[float, bool]]:
    busy: Any = Busy()
    serve(busy, busy, lambda: busy.now, every_s)
    return busy.said


@pytest.mark.parametrize("instances", [1, STREAMING, 4 * STREAMING, 100 * STREAMING])
def test_a_busy_instance_of_a_large_fleet_sends_fewer_tokens_and_is_not_taken_for_dead(instances: int) -> None:
    times = said(stream_s(instances))
    assert all(later - earlier <= STREAM_S + STEP_S for (earlier, _), (later, _) in pairwise(times))
    streamed = [at for at, everything in times if everything]
    assert all(later - earlier >= stream_s(instances) for earlier, later in pairwise(streamed))
    assert len(streamed) >= 100 / (stream_s(instances) + STREAM_S)


@given(st.integers(1, 10**6))
def test_all_instances_together_stream_no_more_than_a_fleet_that_streams_often(instances: int) -> None:
    assert STREAM_S <= stream_s(instances) <= LONGEST_STREAM_S
    if instances <= STREAMING:
        assert stream_s(instances) == STREAM_S
    elif stream_s(instances) < LONGEST_STREAM_S:
        assert instances / stream_s(instances) == pytest.approx(STREAMING / STREAM_S)
