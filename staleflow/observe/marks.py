"""Numbers as a person reads them, and bars and sparklines of characters. Any float can be shown."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Glyphs(NamedTuple):
    """What bars are made of. ``parts`` grow from the thinnest to a full cell."""

    parts: str
    empty: str
    levels: str
    ellipsis: str
    shades: str
    """Of the parts of a whole, one after the other."""


UNICODE = Glyphs("▏▎▍▌▋▊▉█", "·", "▁▂▃▄▅▆▇█", "…", "█▓▒░:")
ASCII = Glyphs("#", ".", "_.-=*#", "~", "#=-:.")


def number(value: float) -> str:
    """At most 5 characters below 10**15: 7, 950, 1.24k, 15.3M."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if abs(value) < 999.5:
        return f"{value:.0f}"
    units = iter("kMGT")
    unit = next(units)
    value /= 1000
    while abs(value) >= 999.5 and unit != "T":
        unit = next(units)
        value /= 1000
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{unit}"


def percent(share: float | None, digits: int | None = None) -> str:
    """A percentage, with one decimal below 10 % unless ``digits`` is given; a dash for None, NaN and infinity."""
    if share is None or not math.isfinite(share):
        return "-"
    value = 100 * share
    if digits is None:
        digits = 1 if 0 < abs(value) < 9.95 else 0
    return f"{value:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """0:07, 3:12, 1:02:07, 3d 04:00."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def decimal(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}" if math.isfinite(value) else number(value)


def before_and_after(measured: Sequence[Mapping[str, Any]], step: int, show: Callable[[float], str]) -> str:
    """The first and the last evaluation, or the only one; its version, unless that is the one after ``step`` steps."""
    figures = " -> ".join(show(each["accuracy"]) for each in (measured[0], measured[-1])[-len(measured) :])
    last = measured[-1]["step"]
    return figures if last == step else f"{figures} (version {last})"


def bar(share: float, width: int, glyphs: Glyphs = UNICODE) -> tuple[str, str]:
    """The full and the empty part of a bar, ``width`` cells together. Anything above 0 shows, however small."""
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    fine = len(glyphs.parts)
    eighths = round(share * width * fine)
    if share > 0 and width > 0:
        eighths = max(1, eighths)
    whole, part = divmod(eighths, fine)
    full = glyphs.parts[-1] * whole + (glyphs.parts[part - 1] if part else "")
    return full, glyphs.empty * (width - len(full))


def spark(
    values: Sequence[float],
    width: int,
    low: float | None = None,
    high: float | None = None,
    glyphs: Glyphs = UNICODE,
) -> str:
    """One character for each of the last ``width`` values; a gap for NaN and infinity. The scale is theirs or given."""
    values = values[-width:] if width > 0 else ()
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low = min(finite) if low is None else low
    high = max(finite) if high is None else high
    top = len(glyphs.levels) - 1
    half_range = high / 2 - low / 2  # halves, so that no difference of floats is infinite

    def level(value: float) -> str:
        place = (min(high, max(low, value)) / 2 - low / 2) / half_range if half_range > 0 else 0.0
        return glyphs.levels[round(place * top)]

    return "".join(level(value) if math.isfinite(value) else " " for value in values)


def portions(values: Sequence[float], width: int) -> list[int]:
    """The cells of each part of a bar of ``width``: all of them, and at least one for each part that is not 0."""
    total = sum(values)
    least = [1 if value > 0 and len(values) <= width else 0 for value in values]  # unless there are too few
    if not total > 0 or not math.isfinite(total):
        return [0] * len(values)
    exact = [value / total * (width - sum(least)) for value in values]
    cells = [one + math.floor(more) for one, more in zip(least, exact, strict=True)]
    behind = sorted(range(len(values)), key=lambda at: exact[at] - math.floor(exact[at]), reverse=True)
    for at in behind[: width - sum(cells)]:
        cells[at] += 1
    return cells
