"""What the time of a run went to is counted from when training began."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from staleflow.runtime.local.time_spent import TimeSpent


@given(shown=st.floats(0, 1e6))
def test_what_was_shown_before_training_does_not_make_the_control_plane_s_time_negative(shown: float) -> None:
    """A short run said ``control plane -11.8% of one core``."""
    run: Any = SimpleNamespace(
        watching=SimpleNamespace(shown_s=shown),
        journal=SimpleNamespace(stamp_from=lambda _: None),
        crew=SimpleNamespace(children={}),
    )
    time = TimeSpent(run)
    assert (time.control_s, time.control_share) == (0, 0), "nothing is counted before training"
    time.begin()
    assert time.control_s >= 0
    run.watching.shown_s += 1e3
    assert time.control_s < 0, "what was shown since is taken off"
