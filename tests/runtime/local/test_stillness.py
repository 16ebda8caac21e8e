"""A run that stands still is noticed; one that moves, or waits for somebody with a limit of his own, is not."""

from staleflow.runtime.local.stillness import Stillness


def test_time_counts_from_the_last_move_and_not_while_somebody_is_waited_for() -> None:
    still = Stillness()
    assert still.look((1.0, 5.0), 10.0, excused=False) == 0
    assert still.look((1.0, 5.0), 30.0, excused=False) == 20
    assert still.look((1.0, 6.0), 31.0, excused=False) == 0
    assert still.look((1.0, 6.0), 50.0, excused=True) == 0
    assert still.look((1.0, 6.0), 58.0, excused=False) == 8
