"""The timeline of a simulated run as one self-contained SVG: what the trainer and the instances did, second by second.

``Timeline`` only looks: it is called between two instants of the virtual clock, sets no timer and sends nothing, so a
run that is watched is the same run (and a stuck run is still found to be stuck). Use::

    timeline = Timeline(cluster)        # before the run, and after whatever else is hooked into it
    cluster.run()
    Path("run.svg").write_text(draw(timeline))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from staleflow.observe.chart import HEADING, LEFT, WIDTH, box, document, round_step, text
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.rollout import SimRollout

LANES = 32
"""The most instances that are shown; of more, a selection at even distances."""
SAMPLES = 800
"""Columns at most. A run that needs more halves them and looks half as often from then on."""
ROUNDING_S = 1e-9
"""Shorter waits are rounding errors of sums of times."""
DOWN = -1

# Okabe and Ito's colours, distinct with any colour vision; the shades of blue grow darker evenly.
TRAINING = "#009E73"
WAITING = {
    "start": ("#D9D9D9", "start"),
    "generation": ("#F0E442", "waits for generation"),
    "tail": ("#D55E00", "waits for the tail"),
    "push": ("#CC79A7", "push"),
}
OTHER = "#7F7F7F"
PULL = "#E69F00"
BROKEN = "#000000"
SHADES = ("#F3F6FA", "#DCE7F3", "#C2D7EA", "#A0C3DF", "#77A9D0", "#4F8DBF", "#2F70AA", "#175391", "#083770")

RIGHT, TOP = 24, 104
TRAINER_HEIGHT, LANE_HEIGHT, GAP = 24, 13, 2


class Wait(NamedTuple):
    start: float
    end: float
    cause: str


class Timeline:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lanes: list[SimRollout] = _chosen(cluster.rollouts)
        self.times: list[float] = []
        self.levels: list[list[int]] = []
        """Sequences that each lane runs, for each time; a lane that joined later is missing in earlier ones."""
        self.pulls: list[tuple[float, int]] = []
        """Time and lane of every new version that was seen on an instance."""
        self.waits: list[Wait] = []
        self._every = 0.0
        self._versions: dict[str, int] = {}
        self._instances = len(cluster.rollouts)
        self._idle: dict[str, float] = {}
        cluster.on_start.append(self._attach)

    def _attach(self) -> None:
        before = self.cluster.loop.on_instant

        def look() -> None:
            if before is not None:
                before()
            self._look()

        self.cluster.loop.on_instant = look

    def end(self) -> None:
        """Record what ended at the last instant of the run, after which there is no other."""
        self._look_at_trainer(self.cluster.loop.time())

    def _look(self) -> None:
        now = self.cluster.loop.time()
        self._look_at_trainer(now)
        if not self.times or now >= self.times[-1] + self._every:
            self._look_at_instances(now)

    def _look_at_trainer(self, now: float) -> None:
        """The trainer adds up its waits, each at the instant at which it ends."""
        for cause, total in self.cluster.trainer.idle.items():
            waited = total - self._idle.get(cause, 0.0)
            if abs(waited) > ROUNDING_S:
                self.waits.append(Wait(now - waited, now, cause))
                self._idle[cause] = total

    def _look_at_instances(self, now: float) -> None:
        joined = self.cluster.rollouts[self._instances :]
        self._instances += len(joined)
        self.lanes += joined[: max(0, LANES - len(self.lanes))]
        self.times.append(now)
        self.levels.append([_level(each) for each in self.lanes])
        for lane, each in enumerate(self.lanes):
            if self._versions.get(each.name) != each.version:
                self._versions[each.name] = each.version
                if each.version >= 0:
                    self.pulls.append((now, lane))
        if len(self.times) == SAMPLES:
            self._every = now / (SAMPLES // 2)
            self._thin()

    def _thin(self) -> None:
        """Keep one sample for each stretch of time, wherever the samples lie."""
        kept, next_at = list[int](), 0.0
        for index, time in enumerate(self.times):
            if time >= next_at:
                kept.append(index)
                next_at = time + self._every
        self.times = [self.times[index] for index in kept]
        self.levels = [self.levels[index] for index in kept]


def _level(rollout: SimRollout) -> int:
    """Sequences that an instance runs now: 0 while it loads weights or hangs."""
    if not rollout.up:
        return DOWN
    model = rollout.engine.instance
    return 0 if model.paused else model.running + model.prefilling


def _chosen(rollouts: list[SimRollout]) -> list[SimRollout]:
    count = min(LANES, len(rollouts))
    return [rollouts[index * len(rollouts) // count] for index in range(count)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds to pixels."""

    end: float

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.end


def draw(timeline: Timeline) -> str:
    """The picture of a run that has ended."""
    body, height = elements(timeline)
    return document(body, height, f"Timeline of a simulated run of {timeline.cluster.setting.name}")


def elements(timeline: Timeline) -> tuple[str, float]:
    """The elements of the picture, and its height."""
    timeline.end()
    cluster = timeline.cluster
    scale = _Scale(cluster.loop.time())
    first = TOP + TRAINER_HEIGHT + 12
    bottom = first + len(timeline.lanes) * (LANE_HEIGHT + GAP)
    parts = [
        *_heading(cluster, len(timeline.lanes)),
        *_trainer_legend(timeline, scale),
        *_instance_legend(timeline),
        *_trainer(timeline, scale),
        *_instances(timeline, scale, first),
        *_commits(timeline, scale, bottom),
        *_axis(scale, bottom),
    ]
    return "\n".join(parts), bottom + 48


# Pieces


def _heading(cluster: Cluster, shown: int) -> Iterator[str]:
    setting, count = cluster.setting, len(cluster.rollouts)
    heading = (
        f"{setting.name}, {cluster.policy.name}, seed {cluster.keyed.seed}: {setting.groups} groups x "
        f"{setting.group_size}, staleness up to {setting.staleness}, "
        f"{count} instances{f' ({shown} shown)' if shown < count else ''}, {setting.training_gpus} training GPUs"
    )
    yield text(LEFT, 26, heading, more=HEADING)


def _trainer_legend(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    shares: dict[str, float] = defaultdict(float)
    for wait in timeline.waits:
        shares[wait.cause] += (wait.end - wait.start) / scale.end
    entries = [(TRAINING, "trains", 1.0 - sum(shares.values()))]
    entries += [(*_colour(cause), shares[cause]) for cause in (*WAITING, *sorted(shares.keys() - WAITING.keys()))]
    yield text(LEFT - 8, 51, "Trainer", "end", ' font-weight="600"')
    x = LEFT
    for colour, name, share in entries:
        if share >= 0.0005:
            yield box(x, 42, 11, 11, colour)
            yield text(x + 16, 51, label := f"{name} {share:.1%}")
            x += 34 + round(6.1 * len(label))


def _colour(cause: str) -> tuple[str, str]:
    return WAITING.get(cause, (OTHER, cause))


def _instance_legend(timeline: Timeline) -> Iterator[str]:
    yield text(LEFT - 8, 71, "Instances", "end", ' font-weight="600"')
    for index, shade in enumerate(SHADES):
        yield box(LEFT + 14 * index, 62, 14, 11, shade)
    yield f'<rect x="{LEFT}" y="62" width="{14 * len(SHADES)}" height="11" fill="none" stroke="#BBBBBB"/>'
    x = LEFT + 14 * len(SHADES)
    yield text(x + 8, 71, f"0 to {_most(timeline)} sequences running")
    yield box(x + 186, 62, 2, 11, PULL)
    yield text(x + 194, 71, "new weights")
    if any(DOWN in levels for levels in timeline.levels):
        yield box(x + 280, 62, 11, 11, BROKEN)
        yield text(x + 296, 71, "down")


def _most(timeline: Timeline) -> int:
    return max(1, max(max(levels) for levels in timeline.levels))


def _trainer(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    yield text(LEFT - 8, TOP + 16, "trainer", "end")
    yield box(LEFT, TOP, scale.x(scale.end) - LEFT, TRAINER_HEIGHT, TRAINING)
    for start, end, cause in timeline.waits:
        yield box(scale.x(start), TOP, scale.x(end) - scale.x(start), TRAINER_HEIGHT, _colour(cause)[0])


def _instances(timeline: Timeline, scale: _Scale, top: float) -> Iterator[str]:
    """One path for each shade, which is far smaller than a rectangle for each change."""
    paths: dict[str, list[str]] = defaultdict(list)
    for lane, rollout in enumerate(timeline.lanes):
        y = top + lane * (LANE_HEIGHT + GAP)
        yield text(LEFT - 8, y + LANE_HEIGHT - 3, rollout.name, "end", ' font-size="10"')
        for start, end, fill in _runs(timeline, lane, scale.end):
            x, right = scale.x(start), scale.x(end)
            paths[fill].append(f"M{x:.1f} {y:g}H{right:.1f}v{LANE_HEIGHT}H{x:.1f}z")
    for time, lane in timeline.pulls:
        y = top + lane * (LANE_HEIGHT + GAP)
        paths[PULL].append(f"M{scale.x(time) - 0.6:.1f} {y:g}h1.2v{LANE_HEIGHT}h-1.2z")
    for fill in (*SHADES, BROKEN, PULL):
        if fill in paths:
            yield f'<path fill="{fill}" shape-rendering="crispEdges" d="{"".join(paths[fill])}"/>'


def _runs(timeline: Timeline, lane: int, end: float) -> Iterator[tuple[float, float, str]]:
    """Stretches of one lane in which its shade stays the same."""
    most = _most(timeline)
    columns = [
        (time, _shade(levels[lane], most))
        for time, levels in zip(timeline.times, timeline.levels, strict=True)
        if lane < len(levels)
    ]
    changes = [(next(same)[0], fill) for fill, same in groupby(columns, key=lambda column: column[1])]
    for (start, fill), (until, _) in zip(changes, [*changes[1:], (end, "")], strict=True):
        yield start, until, fill


def _shade(level: int, most: int) -> str:
    """The shade for a level; the lightest is for 0 only."""
    if level == DOWN:
        return BROKEN
    return SHADES[-(-level * (len(SHADES) - 1) // most)]


def _commits(timeline: Timeline, scale: _Scale, bottom: float) -> Iterator[str]:
    """A line for each version, and its number where there is room for it; the last one always has it."""
    free = float(WIDTH)
    yield text(LEFT - 8, TOP - 8, "version", "end")
    for step in reversed(timeline.cluster.recorder.steps):
        x = scale.x(step.time)
        yield (
            f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom:g}" stroke="#222222" stroke-width="0.8" '
            f'stroke-dasharray="3 2"/>'
        )
        if x <= free:
            yield text(x, TOP - 8, str(step.step + 1), "middle")
            free = x - 22


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    step = round_step(scale.end / 12)
    y = bottom + 6
    yield f'<line x1="{LEFT}" y1="{y:g}" x2="{WIDTH - RIGHT}" y2="{y:g}" stroke="#222222"/>'
    for index in range(int(scale.end / step) + 1):
        x = scale.x(index * step)
        yield f'<line x1="{x:.1f}" y1="{y:g}" x2="{x:.1f}" y2="{y + 4:g}" stroke="#222222"/>'
        yield text(x, y + 16, f"{index * step:,g}", "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, y + 32, "simulated seconds", "middle")
