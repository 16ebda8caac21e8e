"""The states of a trajectory: the allowed transitions, and that there are no others."""

from itertools import product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.servers.lifecycle import NEXT, Group, State, Trajectory

STATES: tuple[State, ...] = get_args(State)
repeatable = settings(derandomize=True, deadline=None)
ENDS: set[State] = {"consumed", "aborted"}
LEGAL = [(state, after) for state in STATES for after in NEXT[state]]
ILLEGAL = [(state, after) for state, after in product(STATES, STATES) if after not in NEXT[state]]


def trajectory(state: State = "queued") -> Trajectory:
    group = Group("p7", prompt=7, attempt=0, prompt_tokens=100, needed=1)
    group.members = [Trajectory("p7/0", group, state)]
    return group.members[0]


def reachable(start: State) -> set[State]:
    seen: set[State] = {start}
    left: list[State] = [start]
    while left:
        for state in NEXT[left.pop()]:
            if state not in seen:
                seen.add(state)
                left.append(state)
    return seen


def test_no_state_is_missing_from_the_table_or_out_of_reach() -> None:
    assert set(NEXT) == set(STATES)
    assert reachable("queued") == set(STATES)


def test_no_trajectory_is_trapped_in_a_state_that_is_not_an_end() -> None:
    assert {state for state in STATES if not NEXT[state]} == ENDS
    for state in set(STATES) - ENDS:
        assert "aborted" in NEXT[state]
        assert "consumed" in reachable(state)


def test_what_is_generated_is_never_generated_again() -> None:
    done: tuple[State, ...] = ("generated", "scored", "complete")
    for state in done:
        assert reachable(state).isdisjoint({"queued", "running", "interrupted"})


@pytest.mark.parametrize(("state", "after"), LEGAL)
def test_every_step_of_the_table_is_possible(state: State, after: State) -> None:
    one = trajectory(state)
    one.go(after)
    assert one.state == after


@pytest.mark.parametrize(("state", "after"), ILLEGAL)
def test_a_step_that_is_not_in_the_table_is_refused_by_name_and_changes_nothing(state: State, after: State) -> None:
    one = trajectory(state)
    with pytest.raises(ValueError, match=rf"^trajectory p7/0 is {state} and cannot become {after}$"):
        one.go(after)
    assert one.state == state


@repeatable
@given(st.lists(st.sampled_from(STATES), max_size=30))
def test_nothing_happens_to_a_trajectory_after_its_end(wishes: list[State]) -> None:
    one, ended = trajectory(), None
    for wish in wishes:
        if wish in NEXT[one.state]:
            one.go(wish)
        else:
            with pytest.raises(ValueError, match="cannot become"):
                one.go(wish)
        assert ended is None or one.state == ended
        ended = one.state if one.state in ENDS else None


@repeatable
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 500)), max_size=5))
def test_the_token_count_never_disagrees_with_the_spans(spans: list[tuple[int, int]]) -> None:
    one = trajectory()
    one.stamp(((0, 77),))
    one.stamp(tuple(spans))
    assert one.generated == sum(count for _, count in spans)
    assert one.context == 100 + one.generated
    assert one.group.begun == bool(spans)
