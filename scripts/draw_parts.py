"""Draws docs/pictures/parts.svg: the parts of StaleFlow and what goes between them.

python scripts/draw_parts.py
"""

from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "parts.svg"
WIDTH, HEIGHT = 1000, 480
CONTROL, OUTSIDE = "#E3EEF9", "#FDF3DC"


class Box(NamedTuple):
    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...]
    fill: str

    @property
    def height(self) -> int:
        return 34 + 16 * len(self.lines)


BOXES = (
    Box(390, 60, 220, "Coordinator", ("pure: a situation in,", "commands out"), CONTROL),
    Box(390, 196, 220, "Trajectory server", ("groups, trajectories, queue;", "every change is an event"), CONTROL),
    Box(160, 196, 170, "Journal", ("the events, in order",), CONTROL),
    Box(670, 196, 170, "Staleness ledger", ("who may start,", "who may be trained"), CONTROL),
    Box(20, 394, 150, "Prompts", ("the data",), OUTSIDE),
    Box(210, 394, 190, "Rollout instances", ("decode, hold KV memory",), OUTSIDE),
    Box(440, 394, 150, "Reward workers", ("score one response",), OUTSIDE),
    Box(630, 394, 140, "Trainer", ("one update a step",), OUTSIDE),
    Box(810, 394, 170, "Parameter server", ("versions of weights",), OUTSIDE),
)

ARROWS = (
    # Each a path, where its label stands, how it is anchored, and the label.
    ("M470 196V130", (462, 160), "end", "snapshots, queue, room"),
    ("M530 126V192", (538, 160), "start", "route, interrupt, pull, abort, truncate"),
    ("M390 216H334", (362, 210), "middle", "writes"),
    ("M610 216H666", (638, 210), "middle", "asks"),
    ("M95 394V340H400V266", (101, 360), "start", "prompts"),
    ("M280 394V320H420V266", (286, 382), "start", "tokens"),
    ("M448 262V366H340V390", (346, 382), "start", "commands"),
    ("M500 262V390", (494, 340), "end", "responses"),
    ("M540 394V266", (546, 340), "start", "scores"),
    ("M576 262V320H680V390", (686, 340), "start", "groups of the open step"),
    ("M770 412H806", (788, 386), "middle", "push"),
    ("M895 444V464H305V448", (600, 459), "middle", "pull"),
)


def box(item: Box) -> list[str]:
    middle = item.x + item.width / 2
    parts = [
        f'<rect x="{item.x}" y="{item.y}" width="{item.width}" height="{item.height}" rx="7" fill="{item.fill}" '
        'stroke="#555"/>',
        f'<text x="{middle:g}" y="{item.y + 21}" text-anchor="middle" font-weight="600">{item.title}</text>',
    ]
    for number, line in enumerate(item.lines):
        y = item.y + 39 + 16 * number
        parts.append(f'<text x="{middle:g}" y="{y}" text-anchor="middle" font-size="12" fill="#444">{line}</text>')
    return parts


def main() -> None:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui,sans-serif" font-size="14" fill="#222">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#333"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<rect x="140" y="16" width="720" height="264" rx="10" fill="none" stroke="#7A9CC6" stroke-dasharray="6 4"/>',
        '<text x="156" y="38" fill="#3F6797" font-weight="600">control plane: no tokens, no weights</text>',
        *(part for item in BOXES for part in box(item)),
    ]
    for path, (x, y), anchor, label in ARROWS:
        lines.append(f'<path d="{path}" fill="none" stroke="#333" stroke-width="1.3" marker-end="url(#tip)"/>')
        lines.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12">{label}</text>')
    TARGET.write_text("\n".join([*lines, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
