"""How far a command is, by a clock that the test moves."""

import io

from staleflow.observe.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_ends_at_once_says_nothing_and_what_lasts_says_it_within_half_a_second() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress("plan", out=out, clock=clock)
    clock.now = 0.4
    progress.show()
    assert out.getvalue() == ""
    clock.now = 0.5
    progress.say("bound 1")
    progress.show()
    assert out.getvalue() == "staleflow plan: 0% in 0:00: bound 1\n"


def test_lines_are_few_where_there_is_no_terminal() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress("plan", out=out, clock=clock)
    for tenths in range(1200):
        clock.now = tenths / 10
        progress.show()
    assert 10 <= out.getvalue().count("\n") <= 13


def test_the_time_left_is_said_once_there_is_something_to_tell_it_by() -> None:
    clock = Clock()
    progress = Progress("compare", out=io.StringIO(), clock=clock)
    clock.now = 60.0
    progress.reach(0.01)
    assert "left" not in progress.line()
    progress.reach(0.25)
    assert progress.line() == "staleflow compare: 25% in 1:00, about 3:00 left: starts"
    clock.now = 7200.0
    progress.reach(2.0)
    assert progress.line() == "staleflow compare: 100% in 2:00:00, about 0:00 left: starts"


def test_a_terminal_has_one_line_at_once_and_none_at_the_end() -> None:
    out = Terminal()
    with Progress("simulate", lambda: 0.5, out) as progress:
        assert "50%" in progress.line()
        assert "staleflow simulate: " in out.getvalue()
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\033[K")
