"""The first screen of ``docs/results/simulation.md`` and its chart, made from the tables of the page itself.

    python bench/simulation_summary.py          # after a change here; simulation.py --write does the same

So the page is the only record, and what its summary says is what its tables say.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from simulation_report import BATCH, HOW, LOSES, OURS, TITLE, WASTELESS, table

from staleflow.observe.chart import COLOURS, HEADING, box, document, text

DOCUMENT = Path(__file__).parent.parent / "docs" / "results" / "simulation.md"
PICTURE = "simulation.svg"
BLUE, ORANGE, GREEN = COLOURS[:3]
LEFT, TOP, ROW, PANEL, GAP, MOST = 196, 84, 27, 310, 22, 4.0
Cells = dict[str, str]


@dataclass(frozen=True)
class Setting:
    """One table of the comparison, at one bound; all but ``waste`` as multiples of the synchronous speed."""

    name: str
    bound: int
    ours: float
    batch: float | None
    """With whole batches."""
    peer: float
    """The best peer that keeps the bound and throws nothing away."""
    discard: float | None
    waste: float
    """The share of tokens that ``discard`` throws away."""
    even: float
    """What a fleet can reach whose instances are equally full."""
    broken: int
    """Groups that the quotas trained too old."""

    @property
    def best(self) -> float:
        return max(self.peer, self.discard or 0.0)


def tables(page: str) -> dict[str, list[Cells]]:
    """The rows of the first table below each heading, by the names of their columns."""
    found: dict[str, list[Cells]] = {}
    for part in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        if rows := re.search(r"(?:^\|.*\n)+", part, re.MULTILINE):
            names, _, *lines = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows[0].splitlines())
            found[part.splitlines()[0]] = [dict(zip(names, line, strict=True)) for line in lines]
    return found


def settings(page: str) -> list[Setting]:
    made: list[Setting] = []
    for heading, rows in tables(page).items():
        if not heading.endswith(" lengths") or "x best peer" not in rows[0]:
            continue
        for bound in sorted({row["bound"] for row in rows}):
            made.append(
                _setting(heading.removesuffix(" lengths"), bound, [row for row in rows if row["bound"] == bound])
            )
    return made


def _setting(name: str, bound: str, rows: list[Cells]) -> Setting:
    speed = {row["policy"]: _first(row["tokens/s"]) for row in rows}
    ratio = {policy: each / speed["synchronous"] for policy, each in speed.items()}
    by_policy = {row["policy"]: row for row in rows}
    return Setting(
        name=name,
        bound=int(bound),
        ours=ratio[OURS],
        batch=ratio.get(BATCH),
        peer=max(ratio[each] for each in WASTELESS if each in ratio),
        discard=ratio.get("discard"),
        waste=_first(by_policy["discard"]["wasted"]) / 100 if "discard" in ratio else 0.0,
        even=ratio[OURS] * 100 / _first(by_policy[OURS]["% even"]),
        broken=sum(int(row["broken"]) for row in rows if row["policy"].startswith("quota")),
    )


def summary(page: str) -> str:
    """From the title to the first heading."""
    every = settings(page)
    bounds = sorted({each.bound for each in every})

    def line(what: str, values: list[list[float]]) -> list[str]:
        return [what, *(f"**{fmean(each):.2f}** ({min(each):.2f} to {max(each):.2f})" for each in values)]

    by_bound = [[each for each in every if each.bound == bound] for bound in bounds]
    rows = [
        line("times the synchronous loop", [[each.ours for each in some] for some in by_bound]),
        line(
            "times the best peer that keeps the bound", [[each.ours / each.best for each in some] for some in by_bound]
        ),
        line("the same without `discard`", [[each.ours / each.peer for each in some] for some in by_bound]),
        line(
            "whole batches: times that peer",
            [[each.batch / each.peer for each in some if each.batch is not None] for some in by_bound],
        ),
        line(
            "of what an evenly filled fleet can reach", [[each.ours / each.even for each in some] for some in by_bound]
        ),
    ]
    settings_run = len({each.name for each in every})
    quotas = {each.name for each in every if each.broken}
    batch = min(each.batch / each.best for each in every if each.batch is not None)
    errors = re.findall(r"Largest errors of a prediction: tokens/s ([\d.]+) %", page)
    loses = min(_first(row["x sync"]) for row in tables(page)[LOSES])
    return "\n".join(
        [
            TITLE,
            f"The production control plane on modelled clusters: {settings_run} settings of the paper's models and "
            f"lengths, bounds {bounds[0]} to {bounds[-1]}, against the policies of other systems, each with the split "
            "of GPUs that suits it best. Mean over the settings, and range:\n",
            table(("throughput in trained tokens/s", *(f"bound {bound}" for bound in bounds)), rows),
            f"![throughput by setting and bound]({PICTURE})\n",
            "- **Most of the gain is streamed consumption**: a group is trained as soon as it may be, not when its "
            "batch is complete. With whole batches on both sides hardly anything is left, and a peer could stream too.",
            "- Low bounds gain the most. Where training binds (long lengths, higher bounds), all policies come near "
            "the same ceiling.",
            "- `discard` is fast where lengths are independent: ours with whole batches would reach only "
            f"{batch:.2f} of it there. But it throws away up to {max(each.waste for each in every):.0%} of the tokens, "
            "more of the long responses; the others throw nothing away.",
            "- The quotas of AReaL and SkyRL do not keep the bound: "
            f"{sum(each.broken for each in every):,} groups were trained too old in {', '.join(sorted(quotas))}.",
            f"- **Asynchrony can lose**: {loses:.2f} times synchronous [on four GPUs without a tail]"
            f"(#{LOSES.lower().replace(' ', '-')}).",
            "- Nothing here is a measurement of a cluster. [Against real runs](#the-simulator-against-real-runs) on "
            "two CPU cores and on one GPU the largest errors of predicted throughput were "
            f"{' and '.join(errors)} %.\n",
        ]
    )


def picture(page: str) -> str:
    every = settings(page)
    names = list(dict.fromkeys(each.name for each in every))
    bottom = TOP + ROW * len(names)
    parts = [
        text(16, 28, "Trained tokens/s as a multiple of the synchronous loop, at the same number of GPUs", more=HEADING)
    ]
    legend = ((BLUE, "StaleFlow"), (ORANGE, "best peer that throws nothing away"), (GREEN, "discard"))
    for at, (colour, name) in enumerate(legend):
        parts += [_dot(24 + 250 * at, 46, colour), text(34 + 250 * at, 50, name)]
    parts += [_tick(774, 46), text(784, 50, "what an evenly filled fleet can reach")]
    parts += [text(LEFT - 12, TOP + ROW * at + 17, name, "end") for at, name in enumerate(names)]
    for panel, bound in enumerate(sorted({each.bound for each in every})):
        left = LEFT + (PANEL + GAP) * panel

        def x(ratio: float, left: float = left) -> float:
            return left + PANEL * (ratio - 1) / (MOST - 1)

        parts.append(text(left, TOP - 10, f"bound {bound}", more=HEADING))
        for mark in range(1, int(MOST) + 1):
            parts.append(f'<path d="M{x(mark):.1f} {TOP}V{bottom}" stroke="#E5E5E5"/>')
            parts.append(text(x(mark), bottom + 16, f"{mark}x", "middle"))
        for each in every:
            if each.bound == bound:
                y = TOP + ROW * names.index(each.name) + 13
                parts.append(box(x(1), y - 1, x(each.ours) - x(1), 2, "#C9D8E8"))
                parts.append(_tick(x(each.even), y))
                parts += [_dot(x(each.discard), y, GREEN)] if each.discard else []
                parts += [_dot(x(each.peer), y, ORANGE), _dot(x(each.ours), y, BLUE)]
    return document("\n".join(parts), bottom + 32, "Throughput of StaleFlow and its peers, simulated")


def write(page: str, target: Path = DOCUMENT) -> None:
    """The page with its summary, and the chart beside it."""
    details = page[page.index(HOW) :]
    target.write_text(f"{summary(details)}\n{details}")
    target.with_name(PICTURE).write_text(picture(details))


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'


def _tick(x: float, y: float) -> str:
    return box(x - 1, y - 8, 2, 16, "#555555")


def _first(cell: str) -> float:
    """The number that a cell begins with."""
    return float(re.match(r"[\d.,]+", cell)[0].replace(",", ""))  # pyright: ignore[reportOptionalSubscript]


if __name__ == "__main__":
    write(DOCUMENT.read_text())
