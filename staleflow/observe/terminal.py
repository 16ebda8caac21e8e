"""The live view of a run in a terminal, and one plain line per step where there is none.

``StatusView`` is a status as rich can draw it; it reads nothing else. ``TerminalView`` decides when
to draw: at most four times a second, and nothing at all where the output is not a terminal::

    view = TerminalView(plain=options.plain)
    view.update(status)         # as often as you like
    view.line(status)           # after every step
    view.close()

Showing a run must never end it: when the output goes away (``| head``), the view falls silent.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Self, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from staleflow.observe.marks import ASCII, UNICODE, Glyphs, bar, decimal, duration, number, percent, spark
from staleflow.observe.status import InstanceStatus, Status

Span = tuple[str, Style | None]
Line = list[Span]

PERIOD_S = 0.25
LEFT = 68
"""Columns of the summary where the instances stand beside it."""
BESIDE = 128
"""From this width on they do."""
LABEL = 11
AGES = 5
"""Rows of the histogram; the last one takes all that is older."""

BOLD, DIM = Style(bold=True), Style(dim=True)
GOOD, BUSY, BAD, ACCENT = Style(color="green"), Style(color="yellow"), Style(color="red"), Style(color="cyan")


def plain_line(status: Status) -> str:
    """The status in one line without colours."""
    parts = [f"step {status.step}/{status.steps}", duration(status.seconds), f"reward {decimal(status.reward)}"]
    if status.accuracy:
        step, value = status.accuracy[-1]
        parts.append(f"held-out {_mean(status, value)}" + (f" (step {step})" if step != status.step else ""))
    if status.max_staleness is not None:
        parts.append(f"staleness {_staleness(status)}")
    if status.tokens_trained:
        parts.append(f"{number(status.tokens_trained)} tokens, {number(status.trained_tokens_per_s)}/s")
    if status.wasted:
        parts.append(f"wasted {percent(status.wasted)}")
    if status.trainer_idle is not None:
        parts.append(f"idle {percent(status.trainer_idle)}")
    if status.loss is not None:
        parts.append(f"loss {decimal(status.loss, 4)}")
    shares = (("cut", status.cut), ("no signal", status.without_signal), ("left out", status.left_out))
    parts += [f"{name} {percent(share)}" for name, share in shares if share]
    down = [each.name for each in status.instances if not each.alive]
    if down:
        parts.append(f"down: {', '.join(down)}")
    if status.waiting_for:
        parts.append(f"waits for {status.waiting_for}")
    return _clean("  ".join(parts))


class TerminalView:
    def __init__(
        self, file: IO[str] | None = None, plain: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._output = _Output(file or sys.stdout)
        self._clock = clock
        self._drawn_at = float("-inf")
        self._pending: Status | None = None
        """The newest status, if it is not on the screen."""
        self._printed: int | None = None
        """The last step that has a line."""
        self._phase = ""
        self._live: Live | None = None
        if not plain and self._output.isatty():
            console = Console(file=cast(IO[str], self._output))
            if not console.is_dumb_terminal:
                self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def update(self, status: Status) -> None:
        """Draws it if the last drawing is old enough; else a later call does, or ``close``."""
        if self._live is None:
            return
        self._pending = status
        now = self._clock()
        if now - self._drawn_at >= PERIOD_S:
            self._drawn_at = now
            self._draw(self._live)

    def line(self, status: Status) -> None:
        """Prints a line if there is no live view and this step has none yet."""
        if self._live is None and status.step != self._printed:
            self._printed = status.step
            self._output.write(plain_line(status) + "\n")
            self._output.flush()

    def phase(self, text: str) -> None:
        """Prints what a run that does not train is doing, once; a live view shows it by its status."""
        if self._live is None and text and text != self._phase:
            self._phase = text
            self._output.write(f"{_clean(text)}\n")
            self._output.flush()

    def note(self, text: str) -> None:
        """Prints a line about something that went wrong; a live view shows it by its status."""
        if self._live is None:
            self._output.write(f"note: {_clean(text)}\n")
            self._output.flush()

    def close(self) -> None:
        """Leaves the last status on the screen, and the terminal as it was. May be called again."""
        if self._live is not None:
            self._draw(self._live)
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, live: Live) -> None:
        if self._pending is not None:
            live.start()
            live.update(StatusView(self._pending), refresh=True)
            self._pending = None


class _Output:
    """A file that never fails: silent for good after its first error, a question mark for what it cannot encode.

    Left to itself rich ends the process when a pipe breaks.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._silent = False
        self.encoding: str = getattr(file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, text: str) -> int:
        self._safely(lambda: self._file.write(text.encode(self.encoding, "replace").decode(self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._safely(self._file.flush)

    def _safely(self, act: Callable[[], object]) -> None:
        if self._silent:
            return
        try:
            act()
        except (OSError, ValueError):  # a broken pipe, a full disk, a closed file
            self._silent = True


# The view as lines of spans


class StatusView:
    """Built of segments and not of rich's tables, which take ten times as long."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UNICODE
        height = options.height or options.max_height
        for line in layout(self.status, options.max_width, height, glyphs):
            for text, style in line:
                yield Segment(text, style)
            yield Segment.line()


def layout(status: Status, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """All lines, each at most ``width`` cells, at most ``height`` of them as far as instances and notes can be cut."""
    beside = width >= BESIDE and bool(status.instances)
    inner = LEFT if beside else width
    top = [_title(status), _progress(status, width, glyphs), []]
    summary = _summary(status, inner, glyphs)
    foot = _foot(status)
    room = height - 1 - len(top) - len(foot)  # one line is the cursor's
    if beside:
        rows = max(1, room - 1)
        instances = _instances(status.instances, width - LEFT - 2, rows, glyphs)
        middle = _join(summary, instances, LEFT + 2, glyphs)
    else:
        rows = max(1, room - len(summary) - 2)
        instances = _instances(status.instances, width, rows, glyphs)
        middle = [*summary, [], *instances] if instances else summary
    lines = [*top, *middle, *foot]
    return [_fitted(line, width, glyphs) for line in lines[: max(1, height - 1)]]


def _title(status: Status) -> Line:
    line: Line = [("StaleFlow", BOLD), (f"   step {status.step}/{status.steps}   {duration(status.seconds)}", None)]
    left = status.seconds_left
    if left is not None and status.step < status.steps:
        line.append((f"   about {duration(left)} left", DIM))
    return [*line, (f"   bound {status.bound}", DIM)]


def _progress(status: Status, width: int, glyphs: Glyphs) -> Line:
    share = status.step / status.steps if status.steps > 0 else 0.0
    full, empty = bar(share, width - 7, glyphs)
    return [(full, ACCENT), (empty, DIM), (f" {percent(min(1.0, share)):>6}", None)]


def _summary(status: Status, width: int, glyphs: Glyphs) -> list[Line]:
    room = min(48, width - LABEL - 26)
    reward: Line = [_label("reward"), (f"{decimal(status.reward):>8}  ", BOLD)]
    reward.append((spark(status.rewards, room, glyphs=glyphs).ljust(room), GOOD))
    if status.loss is not None:
        reward.append((f"  loss {decimal(status.loss, 4)}", DIM if math.isfinite(status.loss) else BAD))
    tokens = f"{number(status.tokens_trained)} trained, {number(status.trained_tokens_per_s)}/s"
    if status.wasted is not None:
        tokens += f", {percent(status.wasted)} wasted"
    if status.cut:
        tokens += f", {percent(status.cut)} of responses cut"
    shares = f"idle {percent(status.trainer_idle)}, control {percent(status.control_overhead)}   "
    groups = f"{number(status.groups_ready)} ready, {number(status.groups_in_flight)} in flight"
    if status.without_signal:
        groups += f", {percent(status.without_signal)} without signal"
    if status.left_out:
        groups += f", {percent(status.left_out)} of prompts left out"
    return [
        reward,
        _held_out(status, room, glyphs),
        *_ages(status, width, glyphs),
        [_label("tokens"), (tokens, None)],
        [_label("trainer"), (shares, None), (_clean(status.trainer_doing), ACCENT)],
        [_label("groups"), (groups, None)],
    ]


def _held_out(status: Status, room: int, glyphs: Glyphs) -> Line:
    if not status.accuracy:
        return [_label("held-out"), (f"{'-':>8}", BOLD)]
    step, value = status.accuracy[-1]
    limits = (0.0, 1.0) if status.binary else (None, None)
    line = spark([accuracy for _, accuracy in status.accuracy], room, *limits, glyphs)
    return [
        _label("held-out"),
        (f"{_mean(status, value):>8}  ", BOLD),
        (line.ljust(room), ACCENT),
        (f"  step {step}", DIM),
    ]


def _mean(status: Status, value: float) -> str:
    """A mean of rewards: a share where they are 0 or 1."""
    return percent(value, 1) if status.binary else decimal(value)


def _ages(status: Status, width: int, glyphs: Glyphs) -> list[Line]:
    """The histogram: a row for every age up to the oldest, what is past the bound in red."""
    counts = {age: count for age, count in status.staleness_histogram.items() if count > 0}
    total = sum(counts.values())
    if not total:
        return [[_label("staleness"), ("-", None)]]
    oldest = max(counts)
    lines: list[Line] = []
    for age in range(min(oldest + 1, AGES)):
        rest = age == AGES - 1 and oldest > age
        count = sum(n for a, n in counts.items() if a >= age) if rest else counts.get(age, 0)
        over = count > 0 and (oldest if rest else age) > status.bound
        full, empty = bar(count / total, min(32, width - LABEL - 34), glyphs)
        name = f"{age}{'+' if rest else ' '} "
        style = BAD if over else GOOD
        head = _label("staleness" if age == 0 else "")
        lines.append([head, (name, None), (full, style), (empty, DIM), (f" {percent(count / total):>6}", None)])
    late = status.max_staleness is not None and status.max_staleness > status.bound
    lines[0].append((f"  {_staleness(status)}", BAD if late else DIM))
    return lines


def _staleness(status: Status) -> str:
    highest = "-" if status.max_staleness is None else status.max_staleness
    return f"mean {decimal(status.mean_staleness, 2)}, max {highest} of {status.bound}"


def _instances(instances: Sequence[InstanceStatus], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    if not instances:
        return []
    fixed = 42  # cells of all but the name and the bar
    names = 1 + min(max(8, *(cell_len(_clean(each.name)) for each in instances[:rows])), 24, width - fixed - 7)
    kv = min(32, width - fixed - names)
    head = f"{'instance':{names}}{'version':>8}{'running':>8}{'waiting':>8}  {'KV':{kv}}{'':7}{'tokens/s':>9}"
    shown = instances if len(instances) <= rows else instances[: max(0, rows - 1)]
    lines: list[Line] = [[(head, DIM)], *(_instance(each, names, kv, glyphs) for each in shown)]
    hidden = instances[len(shown) :]
    if hidden:
        down = sum(not each.alive for each in hidden)
        text = f"and {len(hidden)} more" + (f", {down} of them down" if down else "")
        lines.append([(text, BAD if down else DIM)])
    return lines


def _instance(each: InstanceStatus, names: int, kv: int, glyphs: Glyphs) -> Line:
    name = set_cell_size(_fitted([(_clean(each.name), None)], names - 1, glyphs)[0][0], names)
    version = "-" if each.version is None else f"v{each.version}"
    if not each.alive:
        return [(name, DIM), (f"{version:>8}", DIM), ("    down", BAD)]
    load = each.kv_used / each.kv_total if each.kv_total > 0 else 0.0
    full, empty = bar(load, kv, glyphs)
    return [
        (name, None),
        (f"{version:>8}", None),
        (f"{number(each.running):>8}", None),
        (f"{number(each.waiting):>8}  ", BUSY if each.waiting else DIM),
        (full, BUSY if load > 0.9 else GOOD),
        (empty, DIM),
        (f" {percent(load) if each.kv_total > 0 else '-':>6}", None),
        ("  leaving", BUSY)
        if each.leaving
        else ("  pulling", ACCENT)
        if each.pulling
        else (f"{number(each.tokens_per_s):>9}", None),
    ]


def _foot(status: Status) -> list[Line]:
    lines: list[Line] = []
    if status.doing:
        lines.append([(_clean(status.doing), ACCENT)])
    if status.waiting_for and not status.doing:
        lines.append([("waits for  ", DIM), (_clean(status.waiting_for), BUSY)])
    lines.extend([(_clean(note), DIM)] for note in status.notes[-3:])
    return [[], *lines] if lines else []


# Spans


def _label(name: str) -> Span:
    return f"{name:{LABEL}}", DIM


def _clean(text: str) -> str:
    """In one line and without control characters, whatever a name or an error message brings along."""
    return text if text.isascii() and text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def _fitted(line: Iterable[Span], width: int, glyphs: Glyphs) -> Line:
    """Cut at ``width`` cells, with a mark where something is missing."""
    fitted: Line = []
    for text, style in line:
        cells = cell_len(text)
        if cells > width:
            return [*fitted, (set_cell_size(text, width - 1) + glyphs.ellipsis if width > 0 else "", style)]
        width -= cells
        fitted.append((text, style))
    return fitted


def _join(left: Sequence[Line], right: Sequence[Line], width: int, glyphs: Glyphs) -> list[Line]:
    """Side by side: the right block begins at column ``width``."""
    lines: list[Line] = []
    for at in range(max(len(left), len(right))):
        begin = _fitted(left[at] if at < len(left) else [], width - 1, glyphs)
        if at < len(right):
            used = sum(cell_len(text) for text, _ in begin)
            begin += [(" " * (width - used), None), *right[at]]
        lines.append(begin)
    return lines
