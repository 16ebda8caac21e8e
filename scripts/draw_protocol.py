"""Draws docs/pictures/protocol.svg, the worked example of docs/protocol.md, from the ledger itself.

python scripts/draw_protocol.py
"""

from pathlib import Path

from staleflow.protocol import StalenessLedger

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "protocol.svg"
CELL, GAP, LEFT, TOP, PANEL = 34, 5, 16, 74, 222
COLOURS = {"free": "#ffffff", "in flight": "#fde3b5", "complete": "#a9d8a5", "leased": "#c9c9cf"}


def example() -> list[tuple[str, StalenessLedger]]:
    """Copies of the ledger at each moment of the story, with a caption."""
    ledger = StalenessLedger(batch_size=2, max_staleness=1)
    moments: list[tuple[str, StalenessLedger]] = []

    def show(caption: str) -> None:
        moments.append((caption, StalenessLedger.from_state(ledger.to_state())))

    for group in "abcd":
        assert ledger.reserve(group, 0)
    assert not ledger.can_reserve(0)
    show("1  a b c d reserved at version 0:|due by step 1, no room for a fifth")
    ledger.occupy("c")
    ledger.occupy("a")
    show("2  c and a finish first and take|step 0; b and d can wait for step 1")
    batch = ledger.consume()
    ledger.commit(batch.step)
    for group in "ef":
        assert ledger.reserve(group, 1)
    show("3  step 0 is trained: version 1.|e f reserved, due by step 2")
    ledger.occupy("e")
    assert ledger.take() == []
    show("4  e is complete but may not go:|step 1 is the last for b and d")
    ledger.occupy("b")
    ledger.occupy("d")
    assert ledger.ready()
    show("5  b and d finish: step 1 trains|them at staleness 1, the bound")
    return moments


def panel(number: int, caption: str, ledger: StalenessLedger) -> list[str]:
    x0 = LEFT + number * PANEL
    held = {name: state for name, _, state in ledger.to_state()["groups"]}
    parts = [
        f'<text x="{x0}" y="{22 + 15 * line}" class="caption">{text}</text>'
        for line, text in enumerate(caption.split("|"))
    ]
    for row, step in enumerate(ledger.view()):
        y = TOP + row * (CELL + 26)
        parts.append(f'<text x="{x0}" y="{y - 6}" class="label">step {step.step}: {step.state}</text>')
        for place in range(ledger.batch_size):
            name = step.groups[place] if place < len(step.groups) else ""
            fill = COLOURS[held.get(name, "free")]
            x = x0 + place * (CELL + GAP)
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="5" fill="{fill}"/>')
            parts.append(f'<text x="{x + CELL / 2}" y="{y + 22}" class="name">{name}</text>')
    return parts


def legend(y: int) -> list[str]:
    parts: list[str] = []
    for number, state in enumerate(("free", "in flight", "complete")):
        x = LEFT + number * 110
        parts.append(f'<rect x="{x}" y="{y}" width="16" height="16" rx="3" fill="{COLOURS[state]}"/>')
        parts.append(f'<text x="{x + 24}" y="{y + 13}" class="label">{state}</text>')
    return parts


def main() -> None:
    moments = example()
    width, height = LEFT + PANEL * len(moments) + 40, TOP + 2 * (CELL + 26) + 34
    style = (
        "text{font-family:system-ui,sans-serif;fill:#222}.caption{font-size:11.5px}.label{font-size:11px;fill:#555}"
        ".name{font-size:15px;text-anchor:middle}rect{stroke:#666}"
    )
    body = [part for number, (caption, ledger) in enumerate(moments) for part in panel(number, caption, ledger)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff" style="stroke:none"/>',
        *body,
        *legend(height - 26),
        "</svg>",
    ]
    TARGET.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
