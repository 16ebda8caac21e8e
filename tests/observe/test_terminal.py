import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from staleflow.observe import layout as layouts
from staleflow.observe import terminal
from staleflow.observe.layout import StatusView
from staleflow.observe.status import InstanceStatus, Status
from staleflow.observe.terminal import TerminalView, plain_line

INSTANCES = (
    InstanceStatus("rollout-0", 41, 16, 0, 9000, 65536, tokens_per_s=1234.5),
    InstanceStatus("rollout-1", 42, 15, 2, 64000, 65536, pulling=True),
    InstanceStatus("rollout-2", 42, alive=False),
)
STATUS = Status(
    step=42,
    steps=200,
    seconds=192.4,
    bound=2,
    reward=0.713,
    accuracy=[(0, 0.3), (20, 0.6), (40, 0.842)],
    rewards=[0.1, 0.2, 0.3, 0.4],
    max_staleness=2,
    mean_staleness=0.41,
    staleness_histogram={0: 61, 1: 30, 2: 9},
    tokens_trained=1_240_000,
    tokens_wasted=15_000,
    trained_tokens_per_s=5312.0,
    trainer_idle=0.04,
    trainer_doing="chunk 3 of 4",
    control_overhead=0.003,
    groups_ready=12,
    groups_in_flight=40,
    instances=INSTANCES,
    waiting_for="2 groups of step 42",
    loss=-0.0123,
    notes=("rollout-2 died and is started again",),
)
NEW = Status(step=0, steps=200, seconds=0.0, bound=2)


class Screen(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(status: Status, width: int, height: int = 40, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    Console(file=file, width=width, height=height, force_terminal=False).print(StatusView(status))
    file.flush()
    return raw.getvalue().decode(encoding).split("\n")[:-1]


FULL = replace(
    STATUS,
    waiting_for="2 of 16 groups: p373 (decoding, 212 tokens), p380 (3 decoding, 1,024 tokens), p391 (being scored)",
    notes=tuple(f"i{at} died: killed; started again" for at in range(8)),
    instances=tuple(replace(INSTANCES[at % 3], name=f"i{at}") for at in range(20)),
)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (180, 30)])
def test_a_full_status_is_calm_and_complete_at_three_sizes(width: int, height: int) -> None:
    """The picture of each size is in ``snapshots``; to take new ones, delete them and run this."""
    shown = "\n".join(line.rstrip() for line in drawn(FULL, width, height)) + "\n"
    snapshot = Path(__file__).parent / "snapshots" / f"terminal-{width}x{height}.txt"
    if not snapshot.exists():
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.write_text(shown)
    assert shown == snapshot.read_text()


def test_a_run_that_has_not_trained_yet_shows_what_it_waits_for() -> None:
    assert [line.rstrip() for line in drawn(replace(NEW, waiting_for="the first instance"), 60)] == [
        "StaleFlow   step 0/200   0:00   bound 2",
        "·····················································    0 %",
        "",
        "reward            -",
        "held-out          -",
        "staleness  -",
        "tokens     0 trained, 0/s",
        "trainer    idle -, control -",
        "groups     0 ready, 0 in flight",
        "",
        "waits for  the first instance",
    ]


def test_a_wide_terminal_has_the_instances_beside_the_summary() -> None:
    lines = drawn(STATUS, 160)
    assert "reward" in lines[3]
    assert "instance" in lines[3]
    assert len(lines) < len(drawn(STATUS, 100))


def test_a_terminal_without_unicode_gets_ascii_only() -> None:
    assert all(line.isascii() for line in drawn(STATUS, 80, encoding="ascii"))


def test_more_instances_than_lines_are_counted() -> None:
    many = tuple(InstanceStatus(f"r{at}", alive=at != 60) for at in range(64))
    lines = drawn(replace(STATUS, instances=many), 80, height=24)
    assert len(lines) < 24
    assert any("more, 1 of them down" in line for line in lines)
    assert any("waits for" in line for line in lines)


def test_ages_past_the_last_part_of_the_bar_are_summed_up() -> None:
    lines = drawn(replace(STATUS, bound=8, staleness_histogram={0: 50, 6: 25, 8: 25}), 80)
    assert any(": 4+: 50 %" in line for line in lines)


def test_a_resumed_run_estimates_from_its_own_steps() -> None:
    assert replace(STATUS, first_step=40, seconds=10.0).seconds_left == 5.0 * 158
    assert replace(STATUS, first_step=42).seconds_left is None


floats = st.none() | st.floats()
counts = st.integers(0, 10**15)
texts = st.text(max_size=40)
instances = st.builds(
    InstanceStatus,
    name=texts,
    version=st.none() | st.integers(0, 10**7),
    running=counts,
    waiting=counts,
    kv_used=counts,
    kv_total=counts,
    alive=st.booleans(),
    pulling=st.booleans(),
    tokens_per_s=st.floats(),
)
statuses = st.builds(
    Status,
    step=st.integers(0, 10**7),
    steps=st.integers(0, 10**7),
    seconds=st.floats(0, 1e9),
    bound=st.integers(0, 100),
    reward=floats,
    accuracy=st.lists(st.tuples(st.integers(0, 10**7), st.floats()), max_size=100),
    rewards=st.lists(st.floats(), max_size=100),
    max_staleness=st.none() | st.integers(0, 100),
    mean_staleness=floats,
    staleness_histogram=st.dictionaries(st.integers(0, 100), counts, max_size=8),
    tokens_trained=counts,
    tokens_wasted=counts,
    trained_tokens_per_s=st.floats(),
    trainer_idle=floats,
    trainer_doing=texts,
    control_overhead=floats,
    groups_ready=counts,
    groups_in_flight=counts,
    instances=st.lists(instances, max_size=40).map(tuple),
    waiting_for=texts,
    loss=floats,
    notes=st.lists(texts, max_size=5).map(tuple),
    first_step=st.integers(0, 10),
)


@given(statuses, st.integers(60, 200), st.integers(5, 60))
@settings(deadline=None, max_examples=150)
def test_any_status_fits_its_screen_without_wrapping_and_without_control_characters(
    status: Status, width: int, height: int
) -> None:
    lines = drawn(status, width, height)
    assert len(lines) < height
    for line in lines:
        assert cell_len(line) <= width
        assert line.isprintable()


@given(statuses)
@settings(deadline=None, max_examples=100)
def test_any_status_makes_one_printable_line(status: Status) -> None:
    assert plain_line(status).isprintable()


def test_an_evaluation_is_of_a_version_and_not_of_a_step() -> None:
    """Version 40 is what steps 0 to 39 made: "step 40" is the one that trains it."""
    shown = "\n".join([plain_line(STATUS), *drawn(replace(STATUS, waiting_for=""), 80, 24)])
    assert shown.count("version 40") == 2
    assert "step 40" not in shown


def test_plain_lines_by_example() -> None:
    assert plain_line(NEW) == (
        "step   0/200     0:00  reward      -  loss        -  staleness    - (max -)      0 tokens/s  "
        "idle     -  wasted     -"
    )
    line = (
        "step  42/200     3:12  reward  0.713  loss  -0.0123  staleness 0.41 (max 2)  5.31k tokens/s  "
        "idle 4.0 %  wasted 1.2 %"
    )
    assert plain_line(STATUS) == f"{line}  held-out 84.2 % (version 40)"
    assert plain_line(STATUS, evaluated=40) == line
    assert "loss      nan" in plain_line(replace(STATUS, loss=math.nan))
    assert "held-out 0.842 (version 40)" in plain_line(replace(STATUS, binary=False)), "no share where it is not one"
    shares = plain_line(replace(STATUS, cut=0.8, without_signal=0.75), evaluated=40)
    assert shares == f"{line}  cut  80 %  no signal  75 %"


def test_an_evaluation_is_said_once_and_columns_stay_where_they_are() -> None:
    file = io.StringIO()
    view = TerminalView(file)
    for step in (9, 10, 100):
        view.line(replace(STATUS, step=step, seconds=step * 50, reward=step / 100))
    lines = file.getvalue().splitlines()
    assert ["held-out" in line for line in lines] == [True, False, False]
    assert len({line.index("staleness") for line in lines}) == 1


def test_the_view_shows_what_is_cut_without_signal_and_left_out() -> None:
    status = replace(STATUS, cut=0.8, without_signal=0.75, left_out=0.05)
    shown = "\n".join("".join(text for text, _ in line) for line in layouts.layout(status, 120, 40))
    assert "80 % of responses cut" in shown
    assert "75 % without signal, 5.0 % of prompts left out" in shown


# The view


def test_a_file_gets_one_plain_line_per_step_and_no_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich would take any file for a terminal
    file = io.StringIO()
    with TerminalView(file) as view:
        assert view._live is None
        for step in (1, 1, 2):
            view.update(replace(STATUS, step=step))
            view.line(replace(STATUS, step=step))
    lines = file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/200", "2/200"]
    assert "\x1b" not in file.getvalue()


def test_plain_is_obeyed_on_a_terminal() -> None:
    screen = Screen()
    with TerminalView(screen, plain=True) as view:
        view.update(STATUS)
        view.line(STATUS)
    assert screen.getvalue() == plain_line(STATUS) + "\n"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    with TerminalView(screen) as view:
        view.line(STATUS)
    assert screen.getvalue() == plain_line(STATUS) + "\n"


def terminal_view(monkeypatch: pytest.MonkeyPatch) -> tuple[TerminalView, Screen, Clock]:
    monkeypatch.setenv("TERM", "xterm-256color")
    screen, clock = Screen(), Clock()
    return TerminalView(screen, clock=clock), screen, clock


def test_a_burst_of_updates_is_drawn_once_and_its_last_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    view, screen, clock = terminal_view(monkeypatch)
    for step in range(1, 50):
        view.update(replace(STATUS, step=step))
    assert screen.getvalue().count("StaleFlow") == 1
    clock.now += terminal.PERIOD_S
    view.update(replace(STATUS, step=50))
    assert screen.getvalue().count("StaleFlow") == 2
    view.update(replace(STATUS, step=51))
    view.close()
    assert "step 51/200" in screen.getvalue()
    view.close()
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_lines_do_not_disturb_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    view, screen, _ = terminal_view(monkeypatch)
    view.update(STATUS)
    before = screen.getvalue()
    view.line(STATUS)
    assert screen.getvalue() == before
    view.close()


def test_a_view_that_was_never_updated_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    view, screen, _ = terminal_view(monkeypatch)
    view.close()
    assert screen.getvalue() == ""


class Gone(Screen):
    def write(self, _text: str, /) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("plain", [True, False])
def test_a_run_outlives_its_reader(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    clock, stdout = Clock(), sys.stdout
    with TerminalView(Gone(), plain=plain, clock=clock) as view:
        for step in range(3):
            clock.now += 1
            view.update(replace(STATUS, step=step))
            view.line(replace(STATUS, step=step))
    assert sys.stdout is stdout  # rich stands in for it while it draws


def test_text_that_the_output_cannot_encode_is_replaced() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    TerminalView(file).note("größe")
    assert raw.getvalue().endswith(b"note: gr??e\n")


def test_what_goes_wrong_is_a_line_where_there_is_no_live_view() -> None:
    """Deaths and failures were shown in the live view only."""
    file = io.StringIO()
    TerminalView(file, plain=True).note("i0 died: killed (SIGKILL; out of memory?)\nstarted again")
    assert file.getvalue() == "note: i0 died: killed (SIGKILL; out of memory?) started again\n"


def test_what_a_run_does_before_and_after_training_is_a_line_or_in_the_view() -> None:
    out = io.StringIO()
    with TerminalView(out) as view:
        for doing in (
            "starts: waits for i0, i1",
            "starts: waits for i0",
            "",
            "evaluates version 0",
            "starts: waits for i0",
        ):
            view.phase(doing)
    assert out.getvalue().splitlines() == ["starts: waits for i0, i1", "evaluates version 0", "starts: waits for i0"]
    status = Status(step=0, steps=3, seconds=0, bound=1, doing="evaluates version 0", waiting_for="groups p0")
    shown = "\n".join(drawn(status, 100))
    assert "evaluates version 0" in shown
    assert "waits for" not in shown, "nobody waits for groups before the first step"
