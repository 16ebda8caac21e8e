"""Pictures as SVG, without a plotting library: a line chart with error bars, limits, axes and a legend, and its parts.

document(chart([Curve("ours", [(1, 9_500, 120), (2, 12_000, 90)])], "tokens/s", "bound"), HEIGHT, "Speed")
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1200, 460
LEFT, RIGHT, TOP, BOTTOM = 96, 260, 52, 56
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B6C42",
    "#6A3D9A", "#B2182B", "#4D9221", "#7F7F7F", "#C51B7D", "#01665E", "#BF812D",
)  # fmt: skip
"""The first are Okabe and Ito's, distinct with any colour vision."""
HEADING = ' font-size="15" font-weight="600"'
MOST_TICKS = 12
STEPS = [factor * 10**power for power in range(-6, 12) for factor in (1, 2, 5)]


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float, float]]
    """x, y, and half the error bar."""
    dashed: bool = False
    dots: Sequence[tuple[float, float]] | None = None
    """Where dots are drawn; None: at the points."""

    @property
    def dotted(self) -> Sequence[tuple[float, float]]:
        return [(x, y) for x, y, _ in self.points] if self.dots is None else self.dots


@dataclass(frozen=True, slots=True)
class _Axes:
    low: float
    high: float
    bottom: float
    top: float
    logarithmic: bool

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * self._share(value, self.low, self.high)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self._share(value, self.bottom, self.top)

    def _share(self, value: float, low: float, high: float) -> float:
        if high <= low:
            return 0.5
        return log10(value / low) / log10(high / low) if self.logarithmic else (value - low) / (high - low)

    @property
    def heights(self) -> list[float]:
        """Where the y axis is labelled."""
        if self.logarithmic:
            return [step for step in STEPS if self.bottom <= step <= self.top]
        step = round_step((self.top - self.bottom) / 7)
        return [index * step for index in range(ceil(self.bottom / step), int(self.top / step) + 1)]


def chart(
    lines: Sequence[Curve],
    title: str,
    x_name: str,
    limits: Sequence[tuple[str, float]] = (),
    logarithmic: bool = False,
) -> str:
    """The chart's elements, for ``document`` or ``stacked``. Unless both axes are logarithmic, y has 0 on it."""
    points = [(x, y, error) for line in lines for x, y, error in (*line.points, *((x, y, 0) for x, y in line.dotted))]
    tops = [y + error for _, y, error in points] + [value for _, value in limits]
    lowest = min(y for _, y, _ in points)
    bottom = lowest / 1.2 if logarithmic else min(0.0, 1.08 * lowest)
    at = sorted({x for x, _, _ in points})
    top = (1.2 if logarithmic else 1.08) * max(tops)
    axes = _Axes(at[0], at[-1], bottom, top if top > bottom else bottom + 1.0, logarithmic)
    parts = [text(LEFT, 28, title, more=HEADING)]
    parts += _grid(axes, _ticks(at), x_name)
    for name, value in limits:
        y = axes.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#555555" stroke-dasharray="6 4"/>')
        parts.append(text(WIDTH - RIGHT - 6, y - 5, f"{name} {value:,.0f}", "end"))
    for index, line in enumerate(lines):
        parts += _line(axes, line, COLOURS[index % len(COLOURS)], TOP + 14 + 20 * index)
    return "\n".join(parts)


def document(body: str, height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="11" '
        f'fill="#222222">\n<title>{escape(title)}</title>\n<rect width="100%" height="100%" fill="#FFFFFF"/>\n'
        f"{body}\n</svg>\n"
    )


def stacked(parts: Sequence[tuple[str, float]]) -> str:
    """Pictures below each other, each with its height."""
    shown: list[str] = []
    offset = 0.0
    for body, height in parts:
        shown.append(f'<g transform="translate(0 {offset:g})">\n{body}\n</g>')
        offset += height
    return "\n".join(shown)


def _ticks(values: Sequence[float]) -> Sequence[float]:
    """Where the x axis is labelled: at every value, or where there are many, at round numbers."""
    if len(values) <= MOST_TICKS:
        return values
    step = round_step((values[-1] - values[0]) / MOST_TICKS)
    first = -(-values[0] // step)
    return [step * (first + at) for at in range(int((values[-1] - step * first) / step) + 1)]


def _grid(axes: _Axes, at: Sequence[float], x_name: str) -> Iterator[str]:
    for value in axes.heights:
        y = axes.y(value)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#E5E5E5"/>'
        yield text(LEFT - 8, y + 4, f"{value:,g}", "end")
    for value in at:
        yield text(axes.x(value), HEIGHT - BOTTOM + 18, f"{value:,g}", "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 38, x_name, "middle")


def _line(axes: _Axes, line: Curve, colour: str, legend_y: float) -> Iterator[str]:
    dash = ' stroke-dasharray="7 4"' if line.dashed else ""
    path = "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y, _ in line.points)
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    for x, y in line.dotted:
        yield f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3" fill="{colour}"/>'
    for x, y, error in line.points:
        if error:
            low, high = axes.y(max(0.0, y - error)), axes.y(y + error)
            yield f'<path d="M{axes.x(x):.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>'
    x = WIDTH - RIGHT + 18
    yield f'<path d="M{x} {legend_y - 4:.1f}h22" stroke="{colour}" stroke-width="2"{dash}/>'
    yield text(x + 28, legend_y, line.name)


def round_step(least: float) -> float:
    """The next number above it that is 1, 2 or 5 times a power of ten."""
    return STEPS[bisect_right(STEPS, least)]


def text(x: float, y: float, content: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'
