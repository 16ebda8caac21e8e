"""The timeline of a run as one SVG: steps above, and below a lane for each instance, darker where it ran more.

From the recorded load of the instances (``fleet.jsonl``) and the journal, so real and simulated runs look the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from staleflow.observe.chart import HEADING, LEFT, WIDTH, box, document, round_step, text
from staleflow.run.events import Commit
from staleflow.run.fleet import Moment

LANES = 32
COLUMNS = 400
RIGHT, TOP, LANE, GAP = 24, 56, 13, 2
SHADES = ("#F3F6FA", "#DCE7F3", "#C2D7EA", "#A0C3DF", "#77A9D0", "#4F8DBF", "#2F70AA", "#175391", "#083770")
PULLING, DOWN = "#E69F00", "#000000"


def timeline(moments: Sequence[Moment], commits: Sequence[Commit]) -> str:
    """Empty if nothing was recorded. No more columns and lanes than a page can show."""
    moments = [each for each in moments if each.instances][:: max(1, len(moments) // COLUMNS)]
    if len(moments) < 2 or not (end := max(moments[-1].time, commits[-1].time if commits else 0.0)):
        return ""
    names = sorted({each.name for moment in moments for each in moment.instances}, key=lambda name: (len(name), name))
    lanes = {name: at for at, name in enumerate(names[:: max(1, -(-len(names) // LANES))])}
    most = max(1, max(each.running for moment in moments for each in moment.instances))

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / end

    title = f"instances: 0 to {most} responses running (blue), pulling (orange), down (black); a line for each step"
    parts = [text(LEFT, 28, title, more=HEADING)]
    paths: dict[str, list[str]] = {}
    for moment, after in pairwise(moments):
        left, right = x(moment.time), x(after.time)
        for each in moment.instances:
            if each.name in lanes:
                y = TOP + lanes[each.name] * (LANE + GAP)
                shade = SHADES[-(-each.running * (len(SHADES) - 1) // most)]
                fill = {"pulling": PULLING, "down": DOWN}.get(each.doing, shade)
                paths.setdefault(fill, []).append(f"M{left:.1f} {y}H{right:.1f}v{LANE}H{left:.1f}z")
    crisp = 'shape-rendering="crispEdges"'
    parts += [f'<path fill="{fill}" {crisp} d="{"".join(found)}"/>' for fill, found in paths.items()]
    bottom = TOP + len(lanes) * (LANE + GAP)
    parts += [text(LEFT - 8, TOP + at * (LANE + GAP) + LANE - 3, name, "end") for name, at in lanes.items()]
    shown = commits[:: max(1, len(commits) // 100)]
    parts += [box(x(commit.time), TOP - 4, 0.6, bottom - TOP + 4, "#222222") for commit in shown]
    step = round_step(end / 12)
    for at in range(int(end / step) + 1):
        parts.append(text(x(at * step), bottom + 18, f"{at * step:,g}", "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, "seconds", "middle"))
    return document("\n".join(parts), bottom + 52, "timeline")
