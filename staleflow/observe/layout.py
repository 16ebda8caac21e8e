"""A status as lines of spans for a terminal of any size: what ``terminal.py`` draws.

Calm and complete at 80 x 24: how far the run is and how long it will still take, reward and held-out accuracy with
their history, how stale what was trained is, the instances, what the open step waits for, and what went wrong last.
Instances that do not fit are counted; larger terminals show more of them, and more notes::

    layout(status, width=80, height=24)         # lines of (text, style)
"""

import math
from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from staleflow.observe.marks import ASCII, UNICODE, Glyphs, bar, decimal, duration, number, percent, portions, spark
from staleflow.observe.status import InstanceStatus, Status

Span = tuple[str, Style | None]
Line = list[Span]

LEFT = 68
"""Columns of the summary where the instances stand beside it."""
BESIDE = 128
"""From this width on they do."""
LABEL = 11
AGES = 5
"""Parts of the staleness bar; the last one takes all that is older."""
NOTES = 3
"""Notes that are shown however small the terminal is."""

BOLD, DIM = Style(bold=True), Style(dim=True)
GOOD, BUSY, BAD, ACCENT = Style(color="green"), Style(color="yellow"), Style(color="red"), Style(color="cyan")
BY_AGE = (GOOD, ACCENT, Style(color="blue"), Style(color="magenta"), BUSY)


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
    foot = _foot(status, width)
    notes = [clean(note) for note in status.notes]
    apart = not foot and bool(notes)
    room = height - 1 - len(top) - len(foot) - apart - min(NOTES, len(notes))  # one line is the cursor's
    if beside:
        instances = _instances(status.instances, width - LEFT - 2, max(1, room - 1), glyphs)
        middle = _join(summary, instances, LEFT + 2, glyphs)
    else:
        instances = _instances(status.instances, width, max(1, room - len(summary) - 2), glyphs)
        middle = [*summary, [], *instances] if instances else summary
    more = max(0, room - len(middle)) + min(NOTES, len(notes))
    noted: list[Line] = [[_label("" if at else "notes"), (note, DIM)] for at, note in enumerate(notes[-more:])]
    lines = [*top, *middle, *foot, *([[]] if apart else []), *noted]
    return [_fitted(line, width, glyphs) for line in lines[: max(1, height - 1)]]


def _title(status: Status) -> Line:
    line: Line = [("StaleFlow", BOLD), (f"   step {status.step}/{status.steps}   {duration(status.seconds)}", None)]
    return [*line, (f"   bound {status.bound}", DIM)]


def _progress(status: Status, width: int, glyphs: Glyphs) -> Line:
    share = status.step / status.steps if status.steps > 0 else 0.0
    left = status.seconds_left if status.step < status.steps else None
    text = f" {percent(min(1.0, share)):>6}" + (f", about {duration(left)} left" if left is not None else "")
    full, empty = bar(share, max(0, width - len(text)), glyphs)
    return [(full, ACCENT), (empty, DIM), (text, None)]


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
        [_label("trainer"), (shares, None), (clean(status.trainer_doing), ACCENT)],
        [_label("groups"), (groups, None)],
    ]


def _held_out(status: Status, room: int, glyphs: Glyphs) -> Line:
    if not status.accuracy:
        return [_label("held-out"), (f"{'-':>8}", BOLD)]
    version, value = status.accuracy[-1]
    limits = (0.0, 1.0) if status.binary else (None, None)
    line = spark([accuracy for _, accuracy in status.accuracy], room, *limits, glyphs)
    return [
        _label("held-out"),
        (f"{mean_reward(status, value):>8}  ", BOLD),
        (line.ljust(room), ACCENT),
        (f"  version {version}", DIM),
    ]


def mean_reward(status: Status, value: float) -> str:
    """A mean of rewards: a share where they are 0 or 1."""
    return percent(value, 1) if status.binary else decimal(value)


def _ages(status: Status, width: int, glyphs: Glyphs) -> list[Line]:
    """One bar of all tokens trained, a part for each age; what is past the bound is red. Below it what each part is."""
    counts = {age: count for age, count in status.staleness_histogram.items() if count > 0}
    if not counts:
        return [[_label("staleness"), ("-", None)]]
    ages = [0] * min(1 + max(counts), AGES)
    for age, count in counts.items():
        ages[min(age, AGES - 1)] += count
    bars, parts = [_label("staleness")], [_label("")]
    shown = min(48, width - LABEL - 26)
    for age, (cells, count) in enumerate(zip(portions(ages, shown), ages, strict=True)):
        rest = age == AGES - 1 and max(counts) > age
        over = (max(counts) if rest else age) > status.bound
        style, glyph = BAD if over else BY_AGE[age], glyphs.shades[age]
        bars.append((glyph * cells, style))
        if count:
            parts += [(glyph, style), (f" {age}{'+' if rest else ''}: {percent(count / sum(ages))}   ", None)]
    late = status.max_staleness is not None and status.max_staleness > status.bound
    highest = "-" if status.max_staleness is None else status.max_staleness
    bars.append((f"  mean {decimal(status.mean_staleness, 2)}, max {highest} of {status.bound}", BAD if late else DIM))
    return [bars, parts]


def _instances(instances: Sequence[InstanceStatus], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    if not instances:
        return []
    fixed = 42  # cells of all but the name and the bar
    names = 1 + min(max(8, *(cell_len(clean(each.name)) for each in instances[:rows])), 24, width - fixed - 7)
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
    name = set_cell_size(_fitted([(clean(each.name), None)], names - 1, glyphs)[0][0], names)
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


def _foot(status: Status, width: int) -> list[Line]:
    """What the run does or waits for, in at most two lines."""
    if status.doing:
        return [[], [(clean(status.doing), ACCENT)]]
    if not status.waiting_for:
        return []
    first, *rest = wrap(clean(status.waiting_for), max(20, width - LABEL)) or [""]
    lines: list[Line] = [[], [_label("waits for"), (first, BUSY)]]
    return [*lines, [_label(""), (" ".join(rest), BUSY)]] if rest else lines


# Spans


def _label(name: str) -> Span:
    return f"{name:{LABEL}}", DIM


def clean(text: str) -> str:
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
