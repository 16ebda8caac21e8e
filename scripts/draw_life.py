"""Draws docs/pictures/life.svg: the life of one trajectory, read from the journal of a simulated run.

    python scripts/draw_life.py

The run is small and short of KV memory, so that trajectories move; weights change while they are generated. Of those
that were trained, and not the last of their group to be scored, the one that ran on the most instances, under the most
versions and for the longest is drawn. Events carry no time: the clock is read between two instants, and the number of
events so far says which belong to which instant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from staleflow.servers.journal import Event
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.setting import Setting, preset
from staleflow.types import Spans

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "life.svg"
SEED = 5
WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 1080, 120, 40, 84, 26, 12
VERSIONS = ("#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#0072B2", "#F0E442")
WAITS, SCORING, TRAINING, MOVING = "#D9D9D9", "#B8A9D9", "#8FBF8F", "#D55E00"
IN_SERVER, SCORED, COMPLETE, TRAINED = "in the server", "reward worker", "scored", "trainer"


def small() -> Setting:
    return replace(
        preset("paper-14b"),
        steps=6,
        instances=4,
        groups=16,
        group_size=8,
        training_gpus=16,
        kv_tokens=60_000,
        reward_s=4.0,
    )


class Timed(NamedTuple):
    time: float
    event: Event


def simulate(setting: Setting, seed: int) -> list[Timed]:
    """The events of a run, each with the time at which it was written."""
    cluster = Cluster(setting, seed, keep_journal=True)
    events, times, counts = cluster.journal.events, list[float](), list[int]()

    def look() -> None:
        times.append(cluster.loop.time())
        counts.append(len(events))

    cluster.loop.on_instant = look
    cluster.run()
    times.append(cluster.loop.time())
    return [Timed(times[bisect_right(counts, index)], event) for index, event in enumerate(events)]


class Bar(NamedTuple):
    lane: str
    start: float
    end: float
    colour: str
    text: str
    """Inside the bar where there is room for it, otherwise in the legend."""


@dataclass(slots=True)
class Life:
    """What the journal says about one trajectory and its group."""

    name: str
    bars: list[Bar] = field(default_factory=list[Bar])
    marks: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    """(time, lane, colour) of moments."""
    siblings: list[float] = field(default_factory=list[float])
    """When the other members were scored."""
    spans: Spans = ()
    step: int = 0


def choose(events: list[Timed]) -> str:
    """The trained trajectory with the most instances, versions and tokens, if others of its group were slower."""
    instances: dict[str, set[str]] = defaultdict(set)
    spans: dict[str, Spans] = {}
    trained: set[str] = set()
    last: dict[str, str] = {}
    for _, (kind, *what) in events:
        if kind == "route":
            instances[what[0]].add(what[1])
        elif kind == "generated":
            spans[what[0]] = what[1]
        elif kind == "score":
            last[what[0].partition("/")[0]] = what[0]
        elif kind in ("lease", "consume"):
            trained.update(what[0])
    known = [name for name in spans if (group := name.partition("/")[0]) in trained and last[group] != name]
    return max(known, key=lambda name: (len(instances[name]), len(spans[name]), sum(count for _, count in spans[name])))


def live(events: list[Timed], name: str) -> Life:
    """Follow one trajectory through the events."""
    life = Life(name)
    group = name.partition("/")[0]
    since, place, tokens = 0.0, IN_SERVER, 0

    def close(now: float, colour: str, text: str) -> None:
        nonlocal since
        if now > since:
            life.bars.append(Bar(place, since, now, colour, text))
        since = now

    def decoded(now: float, spans: Spans) -> None:
        """Tokens up to now: those beyond what was known are of the last version of ``spans``."""
        nonlocal tokens
        total = sum(count for _, count in spans)
        if total > tokens and place != IN_SERVER:
            version = spans[-1][0]
            close(now, VERSIONS[version % len(VERSIONS)], f"version {version}: {total - tokens:,} tokens")
        tokens, life.spans = total, spans

    for now, (kind, *what) in events:
        if kind == "admit" and group == f"p{what[0]}":
            since = now
        elif kind == "score" and what[0] != name and what[0].partition("/")[0] == group:
            life.siblings.append(now)
        elif kind == "occupy" and what[0] == group:
            close(now, WAITS, "waits for its group")
            place = COMPLETE
        elif kind in ("lease", "consume") and group in what[0] and place != TRAINED:
            close(now, WAITS, "waits for its step")
            place = TRAINED
        elif kind == "commit" and place == TRAINED:
            close(now, TRAINING, f"in step {what[0]} until its push")
            life.step = what[0]
            return life
        elif what and what[0] == name:
            if kind == "route":
                close(now, WAITS, "")
                place = what[1]
            elif kind == "stream":
                decoded(now, what[1])
            elif kind == "interrupt":
                life.marks.append((now, place, MOVING))
            elif kind == "requeue":
                close(now, WAITS, "")
                place = IN_SERVER
            elif kind == "generated":
                decoded(now, what[1])
                place = SCORED
            elif kind == "score":
                close(now, SCORING, "")
                place = COMPLETE
    raise ValueError(f"{name} was not trained in this run; choose another")


def draw(life: Life, commits: list[tuple[float, int]]) -> str:
    lanes = list(dict.fromkeys([IN_SERVER, *(bar.lane for bar in life.bars)]))
    first, last = life.bars[0].start, life.bars[-1].end
    bottom = TOP + len(lanes) * (LANE + GAP)

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (time - first) / (last - first)

    parts: list[str] = [
        _text(LEFT, 24, f"The life of trajectory {life.name}", ' font-size="15" font-weight="600"'),
        _text(LEFT, 44, _story(life)),
    ]
    for row, lane in enumerate(lanes):
        y = TOP + row * (LANE + GAP)
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" fill="#F6F7F9"/>')
        label = f"instance {lane}" if lane[1:].isdigit() else lane
        parts.append(_text(LEFT - 10, y + 17, label, ' text-anchor="end"'))
        for bar in life.bars:
            if bar.lane == lane:
                parts += _bar(bar, x(bar.start), x(bar.end), y)
        for time, where, colour in life.marks:
            if where == lane:
                parts.append(f'<path d="M{x(time):.1f} {y - 1}l-5 -8h10z" fill="{colour}"/>')
        if lane == COMPLETE:
            parts += [
                f'<line x1="{x(time):.1f}" y1="{y + 4}" x2="{x(time):.1f}" y2="{y + LANE - 4}" stroke="#222" '
                f'stroke-width="1.5"/>'
                for time in life.siblings
                if first <= time
            ]
    for time, version in commits:
        if first < time <= last:
            parts.append(
                f'<line x1="{x(time):.1f}" y1="{TOP - 10}" x2="{x(time):.1f}" y2="{bottom}" stroke="#222" '
                f'stroke-width="0.8" stroke-dasharray="3 2"/>'
            )
            parts.append(_text(x(time), TOP - 14, f"version {version}", ' text-anchor="middle"'))
    parts += _axis(first, last, bottom, x)
    parts += _legend(life, bottom + 58)
    height = bottom + 106
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui,sans-serif" font-size="12" fill="#222">\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _story(life: Life) -> str:
    spans = ", ".join(f"{count:,} tokens of version {version}" for version, count in life.spans)
    oldest = min(version for version, _ in life.spans)
    return f"{spans}. Trained at step {life.step}: its oldest token is {life.step - oldest} steps old."


def _bar(bar: Bar, left: float, right: float, y: float) -> list[str]:
    parts = [
        f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="{LANE}" fill="{bar.colour}" '
        f'stroke="#666" stroke-width="0.5"><title>{bar.text}</title></rect>'
    ]
    if right - left > 6.4 * len(bar.text):
        parts.append(_text((left + right) / 2, y + 17, bar.text, ' text-anchor="middle"'))
    return parts


def _axis(first: float, last: float, bottom: float, x: Callable[[float], float]) -> list[str]:
    y = bottom + 2
    parts = [f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#222"/>']
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if (last - first) / step <= 14)
    for mark in range(-(-int(first) // step) * step, int(last) + 1, step):
        if mark >= first:
            parts.append(f'<line x1="{x(mark):.1f}" y1="{y}" x2="{x(mark):.1f}" y2="{y + 4}" stroke="#222"/>')
            parts.append(_text(x(mark), y + 17, f"{mark:,}", ' text-anchor="middle"'))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, y + 34, "simulated seconds", ' text-anchor="middle"'))
    return parts


def _legend(life: Life, y: float) -> list[str]:
    entries = [(VERSIONS[version % len(VERSIONS)], f"decodes, version {version}") for version, _ in life.spans]
    entries += [(WAITS, "waits"), (SCORING, "is scored"), (TRAINING, "is with the trainer")]
    parts: list[str] = []
    x = float(LEFT)
    for colour, text in entries:
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{colour}" stroke="#666"/>')
        parts.append(_text(x + 18, y + 10, text))
        x += 34 + 6.6 * len(text)
    x, y = float(LEFT), y + 22
    parts.append(f'<path d="M{x + 6:.0f} {y + 12}l-5 -9h10z" fill="{MOVING}"/>')
    parts.append(_text(x + 18, y + 10, "is interrupted"))
    x += 36 + 6.6 * len("is interrupted")
    parts.append(f'<line x1="{x:.0f}" y1="{y}" x2="{x:.0f}" y2="{y + 12}" stroke="#222" stroke-width="1.5"/>')
    parts.append(_text(x + 8, y + 10, "another member of the group is scored"))
    return parts


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{text}</text>'


def main() -> None:
    events = simulate(small(), SEED)
    commits = [(now, what[0] + 1) for now, (kind, *what) in events if kind == "commit"]
    TARGET.write_text(draw(live(events, choose(events)), commits))


if __name__ == "__main__":
    main()
