"""Draws docs/pictures/flow.svg, the picture of the README: what goes where, and what the bound means.

python scripts/draw_flow.py
"""

from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "flow.svg"
WIDTH, HEIGHT = 1000, 400
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 }
.small { font-size: 12px; fill: #59636e } .page { fill: #ffffff } .part { fill: #f6f8fa; stroke: #818b98 }
.arrow { fill: none; stroke: #59636e; stroke-width: 1.4 }
.tip { fill: #59636e } .v5 { fill: #cfe3f7 } .v6 { fill: #8fbfea } .v7 { fill: #4a93d4 } .group { stroke: #59636e }
.flying { fill: none; stroke-dasharray: 4 3 } .number { font-size: 13px; text-anchor: middle } text.on { fill: #10151b }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .page { fill: #0d1117 } .part { fill: #151b23; stroke: #656c76 }
  .arrow { stroke: #9198a1 } .tip { fill: #9198a1 } .group { stroke: #9198a1 }
}
"""
"""An opaque page of its own, so that it can be read on any."""

PARTS = (
    # x, y, width, height, title, lines below it
    (20, 92, 118, 66, "Prompts", ("your data",)),
    (186, 40, 216, 170, "Rollout instances", ()),
    (450, 92, 126, 66, "Rewards", ("your functions",)),
    (624, 40, 356, 170, "Staleness ledger", ()),
    (724, 262, 156, 66, "Trainer", ("GRPO ... PPO, LoRA",)),
    (216, 262, 156, 66, "Weights", ("in shared memory",)),
)
ARROWS = (
    # a path, where its label stands and how it is anchored, and the label
    ("M138 125H180", 0, 0, "", ""),
    ("M402 125H444", 0, 0, "", ""),
    ("M576 125H618", 0, 0, "", ""),
    ("M802 210V256", 792, 239, "end", "groups of step 7, as they complete"),
    ("M724 295H378", 551, 287, "middle", "push version 8"),
    ("M294 262V216", 304, 244, "start", "each pulls when it suits"),
)
INSTANCES = ((7, "decodes under version 7"), (7, "decodes under version 7"), (6, "pulls version 7 now"))
STEPS = (
    # what the ledger holds: the name of a step, and the version of each group, negative while it is in flight
    ("step 7", (5, 6, 5, -6)),
    ("step 8", (6, 7, -6, -7)),
    ("step 9", (-7, -7, 0, 0)),
)
CAPTION = (
    "bound 2: step 7 trains on versions 5, 6 and 7, and no older token. A group has its place before its first token."
)


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{content}</text>'


def group(x: float, y: float, version: int) -> list[str]:
    """A square with its version: filled when it is complete, dashed while it is in flight, empty if there is none."""
    kind = f"v{version}" if version > 0 else "flying"
    square = f'<rect x="{x:g}" y="{y:g}" width="34" height="26" rx="5" class="group {kind}"/>'
    return (
        [square, text(x + 17, y + 18, str(abs(version)), "number on" if version > 0 else "number")] if version else []
    )


def main() -> None:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img">',
        "<title>Prompts go to rollout instances, responses to rewards, scored groups to the ledger and on to the "
        "trainer; instances pull the versions that it makes</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>',
        '<rect width="100%" height="100%" rx="10" class="page"/>',
    ]
    for x, y, width, height, title, below in PARTS:
        lines.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" class="part"/>')
        lines.append(text(x + width / 2, y + 28, title, "title", "middle"))
        lines += [text(x + width / 2, y + 48 + 16 * at, line, "small", "middle") for at, line in enumerate(below)]
    for path, x, y, anchor, label in ARROWS:
        lines.append(f'<path d="{path}" class="arrow" marker-end="url(#tip)"/>')
        lines += [text(x, y, label, "small", anchor)] if label else []
    for at, (version, doing) in enumerate(INSTANCES):
        lines += group(202, 84 + 40 * at, version)
        lines.append(text(248, 102 + 40 * at, doing, "small"))
    for at, (step, versions) in enumerate(STEPS):
        lines.append(text(644, 102 + 40 * at, step))
        for place, version in enumerate(versions):
            lines += group(704 + 44 * place, 84 + 40 * at, version)
    lines.append(text(796, 182, "filled: scored, dashed: not yet", "small"))
    lines.append(text(WIDTH / 2, 374, CAPTION, "", "middle"))
    TARGET.write_text("\n".join([*lines, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
