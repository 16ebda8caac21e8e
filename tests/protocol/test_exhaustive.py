"""All interleavings of small ledgers: the six invariants in every state, and a way on from every state."""

import pytest

from tests.protocol.explorer import SIZES, Exploration

LONG = (2, 2, 0, 6)
"""Half of all the time, for what one group less shows as well; the rest of the sizes are in every run."""


@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=[pytest.mark.slow] * (size == LONG)) for size in SIZES],
    ids=lambda size: "batch{}-staleness{}-redundancy{}-groups{}".format(*size),
)
def test_every_reachable_state_keeps_the_invariants_and_can_go_on(size: tuple[int, int, int, int]) -> None:
    found = Exploration(*size).run()
    print(f"{found.states:,} states, {found.transitions:,} transitions")
    assert found.commits, "no step was ever trained: the exploration did not explore"
    assert found.hopeless() == 0
