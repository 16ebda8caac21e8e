"""What is told of a trajectory is what happened to it."""

from staleflow.dash.life import tell
from staleflow.run.events import Timed

STORY = [
    Timed(1.0, ("admit", 7, 1, 30)),
    Timed(1.0, ("reserve", "p7.1", 3)),
    Timed(1.1, ("route", "p7.1/0", "i0", 1)),
    Timed(2.0, ("stream", "p7.1/0", ((3, 10),))),
    Timed(3.0, ("interrupt", "p7.1/0")),
    Timed(3.1, ("requeue", "p7.1/0")),
    Timed(3.2, ("route", "p7.1/0", "i1", 2)),
    Timed(4.0, ("stream", "p7.1/0", ((3, 10), (4, 5)))),
    Timed(5.0, ("requeue", "p7.1/0")),
    Timed(5.1, ("route", "p7.1/0", "i2", 3)),
    Timed(6.0, ("generated", "p7.1/0", ((3, 10), (4, 12), (5, 1)))),
    Timed(6.1, ("score", "p7.1/0", 0.5)),
]


def test_a_move_and_a_death_are_told_apart() -> None:
    stays, events = tell(STORY, "p7.1/0")
    assert [(stay.instance, stay.why) for stay in stays] == [
        ("i0", "came back"),
        ("i1", "its instance was lost"),
        ("i2", "ended"),
    ]
    assert "attempt 2" in events[0].text


def test_every_token_is_in_the_stay_in_which_it_was_made() -> None:
    stays, _ = tell(STORY, "p7.1/0")
    assert [stay.spans for stay in stays] == [((3, 10),), ((4, 5),), ((4, 7), (5, 1))]


def test_why_a_group_was_given_up_is_told() -> None:
    stays, events = tell([*STORY[:4], Timed(2.5, ("release", "p7.1", "tail", True))], "p7.1/0")
    assert stays[0].end == 2.5
    assert events[-1].text == "its group was given up: tail; its prompt is drawn again"
