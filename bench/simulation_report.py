"""From the sections of ``simulation.py`` to the details of the document: tables, and the targets with what was reached.

What stands before them, ``simulation_summary.py`` makes from these tables.
"""

import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from statistics import fmean
from typing import Any

import simulator_error

Row = dict[str, Any]

TARGETS = {1: 1.30, 2: 1.20, 3: 1.10}
"""Ours, streamed, against the best bound-keeping peer as it ships: the mean over all settings, by bound."""
OURS, BATCH = "staleflow", "staleflow+batch"
TITLE, HOW, LOSES = "# Simulated results\n", "## How this was made\n", "Where asynchrony loses"
WASTELESS = ("synchronous", "one_step", "window_wait", "psrl_default")


def render(results: dict[str, Any], seeds: tuple[int, int], steps: int, tuning_seed: int, quick: bool) -> str:
    parts = [
        HOW,
        f"Made by `python bench/simulation.py --write` {made()}: {steps} steps, without the start, {seeds[0]} paired "
        f"seeds in the comparison and {seeds[1]} in the other sections, ± is half a 95 % confidence interval. Splits "
        f"are tuned for every policy with six runs under seed {tuning_seed}, which nothing is measured on. [The "
        "simulator](../simulator.md) says what is modelled, what is assumed, and what each column means.\n",
    ]
    if quick:
        parts.append("**This is `--quick`**: a quarter of the batch on a quarter of the GPUs, for a first look only.\n")
    for name, section in PARTS.items():
        if results.get(name):
            parts += section(results[name])
    return "\n".join(parts) + "\n"


def made() -> str:
    """When, and with which version of the code."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return f"on {date.today()}" + (f" with commit {commit}" if commit else "")


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    rows = list(rows)
    assert all(len(row) == len(names) for row in rows), names
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def speed(row: Row) -> str:
    return f"{row['trained_tokens_per_s']:,.0f} ± {number(row['ci95'], ',.0f') or '?'}"


def price(row: Row) -> list[str]:
    """Columns that stand beside every speed."""
    return [
        f"{row['violations']}",
        f"{row['mean_staleness']:.2f}",
        f"{row['wasted_fraction']:.1%}",
        f"{row['length_shift']:.3f}",
    ]


PRICE = ("broken", "staleness", "wasted", "length shift")


def comparison(cells: list[Any]) -> list[str]:
    parts = [
        "## The comparison\n",
        *targets(cells),
        *overview(cells),
        "`x best peer` is the mean of the ratios, seed by seed, to the peer that is the fastest of those that keep the "
        "bound, as they ship: with whole batches. `discard` keeps it by throwing groups away: see what it wastes and "
        "how that shifts the lengths that are trained on. The quotas break it (`broken`: groups that were trained too "
        "old); they and `window_wait+stream` were run in some settings only.\n",
    ]
    for cell in cells:
        parts.append(f"### {cell['preset']}, {cell['lengths']} lengths\n")
        names = (
            "bound",
            "policy",
            "GPUs r+t",
            "tokens/s",
            "x sync",
            "x best peer",
            "% limit",
            "% law",
            "binds",
            "% even",
            *PRICE,
        )
        rows = [
            [
                f"{row['staleness']}",
                row["policy"],
                f"{row['rollout_gpus']}+{row['training_gpus']}",
                speed(row),
                number(row["vs_synchronous"]),
                number(row["vs_best_bounded"]),
                f"{row['percent_of_limit']:.0f}",
                f"{row['percent_of_law']:.0f}",
                row["law_binds"],
                number(row["percent_of_even"], ".0f"),
                *price(row),
            ]
            for row in cell["rows"]
        ]
        parts.append(table(names, rows))
    return parts


def targets(cells: list[Any]) -> list[str]:
    bounds = sorted({row["staleness"] for cell in cells for row in cell["rows"]})

    def of(policy: str, bound: int) -> list[Row]:
        rows = [row for cell in cells for row in cell["rows"]]
        return [row for row in rows if row["policy"] == policy and row["staleness"] == bound]

    lines: list[list[str]] = []
    for bound in bounds:
        ours, batch = [[row["vs_best_bounded"] for row in of(name, bound)] for name in (OURS, BATCH)]
        target = f"{TARGETS[bound]:.2f}" if bound in TARGETS else ""
        lines.append([f"bound {bound}: ours over the best bounded peer, mean", target, f"{fmean(ours):.2f}"])
        least = [wasteless(cell, bound) for cell in cells]
        lines.append([f"bound {bound}: the same without `discard`, mean", "", f"{fmean(least):.2f}"])
        most = [row["vs_best_bounded"] * 100 / row["percent_of_even"] for row in of(OURS, bound)]
        lines.append([f"bound {bound}: what the even ceiling would be over that peer, mean", "", f"{fmean(most):.2f}"])
        lines.append([f"bound {bound}: whole batches on both sides, mean", "1.02", f"{fmean(batch):.2f}"])
        lines.append([f"bound {bound}: whole batches on both sides, least", "0.98", f"{min(batch):.2f}"])
        whole = [wasteless(cell, bound, BATCH) for cell in cells if has(cell, BATCH)]
        figures = f"{fmean(whole):.2f}, {min(whole):.2f}"
        lines.append([f"bound {bound}: the same without `discard`, mean and least", "", figures])
        if bound == 2:
            sync = [row["vs_synchronous"] for row in of(OURS, bound)]
            law = [row["percent_of_law"] for row in of(OURS, bound)]
            lines.append(["bound 2: ours over synchronous, mean", "2.30", f"{fmean(sync):.2f}"])
            even = [row["percent_of_even"] for row in of(OURS, bound)]
            lines.append(["bound 2: percent of the law's ceiling, least", "85", f"{min(law):.0f}"])
            lines.append(["bound 2: percent of the even ceiling, least", "", f"{min(even):.0f}"])
    best = max(row["vs_best_bounded"] for bound in bounds for row in of(OURS, bound))
    sync = max(row["vs_synchronous"] for bound in bounds for row in of(OURS, bound))
    lines.append(["best case over the best bounded peer", "1.42", f"{best:.2f}"])
    lines.append(["best case over synchronous", "2.68", f"{sync:.2f}"])
    return ["Over all settings below:\n", table(("what", "target", "reached"), lines)]


def wasteless(cell: Any, bound: int, ours: str = OURS) -> float:
    """Ours over the best bounded peer that throws nothing away, by mean speeds."""
    rows = {row["policy"]: row for row in cell["rows"] if row["staleness"] == bound}
    peers = [row["trained_tokens_per_s"] for name, row in rows.items() if name in WASTELESS and not row["violations"]]
    return rows[ours]["trained_tokens_per_s"] / max(peers)


def has(cell: Any, policy: str) -> bool:
    return any(row["policy"] == policy for row in cell["rows"])


def overview(cells: list[Any]) -> list[str]:
    """Ratios to the best bounded peer in every setting: ours, ours without streaming, and a peer with it."""

    def ratios(cell: Any, policy: str) -> str:
        rows = [row for row in cell["rows"] if row["policy"] == policy]
        return " / ".join(number(row["vs_best_bounded"]) for row in rows)

    def best(cell: Any) -> str:
        rows = [row for row in cell["rows"] if row["policy"] == OURS]
        return " / ".join(f"{row['vs_synchronous']:.2f}" for row in rows)

    lines = [
        [
            f"{cell['preset']}, {cell['lengths']}",
            ratios(cell, OURS),
            " / ".join(f"{wasteless(cell, bound):.2f}" for bound in sorted({row["staleness"] for row in cell["rows"]})),
            ratios(cell, BATCH),
            ratios(cell, "window_wait+stream"),
            best(cell),
        ]
        for cell in cells
    ]
    names = (
        "setting",
        "ours",
        "without `discard`",
        "ours, whole batches",
        "`window_wait`, streamed",
        "ours over synchronous",
    )
    return [
        "What comes from where, as ratios to the best bounded peer at each bound (1 / 2 / 3). Most of the gain is "
        "streamed consumption, which a peer could adopt too:\n",
        table(names, lines),
        "Where training binds (long lengths, higher bounds) every policy comes near the same ceiling, and nothing can "
        "be much faster: *what the even ceiling would be over that peer* is the most that the means above could be.\n",
    ]


def ceilings(cells: list[Any]) -> list[str]:
    lines = [
        [
            f"{cell['preset']}, {cell['lengths']}",
            f"{cell['law']:,.0f}",
            cell["binds"],
            *(f"{100 * cell[name] / cell['law']:.1f}" for name in ("one_lane", "two_lanes", "even")),
        ]
        for cell in cells
    ]
    names = ("setting", "law, tokens/s", "binds", "% one lane", "% two lanes", "% even")
    return [
        "## What forbids more\n",
        "Computed at bound 2, as shares of the law's ceiling. The law's own fleet is at once full, for the work, and "
        "empty, for the longest trajectory. *One lane*: all instances are equally full, in balance (Little's law), and "
        "pulls cost nothing. *Two lanes*: long trajectories change to instances of their own at the best length, with "
        "the best share of the fleet, still without any cost of a pull; that they are never faster says that it is no "
        "use to keep long trajectories apart, because contexts slow each other. *Even*: one lane whose instances pull "
        "every version and prefill again what they hold. So 85 % of the law is out of reach for such a fleet wherever "
        "*even* is below 85; `% even` in the tables above is of that.\n",
        table(names, lines),
    ]


def variations(rows: list[Row], first: str) -> str:
    names = (first, "GPUs r+t", "tokens/s", "ratio", *PRICE)
    return table(
        names,
        (
            [
                row["name"],
                f"{row['rollout_gpus']}+{row['training_gpus']}",
                speed(row),
                number(row["ratio"], ".3f"),
                *price(row),
            ]
            for row in rows
        ),
    )


def ablation(cells: list[Any]) -> list[str]:
    parts = [
        "## What each strategy is worth\n",
        "One thing is changed at a time; the split stays that of the first line.\n",
    ]
    for cell in cells:
        parts.append(f"### {cell['preset']}, {cell['lengths']} lengths, bound {cell['staleness']}\n")
        parts.append(variations(cell["rows"], "strategies"))
    return parts


def chunks(cells: list[Any]) -> list[str]:
    parts = ["## Streaming by chunk size\n", "paper-14b, independent lengths; groups that are fed at once.\n"]
    for cell in cells:
        parts += [f"Bound {cell['staleness']}:\n", variations(cell["rows"], "chunk")]
    return parts


def ready(cells: list[Any]) -> list[str]:
    parts = ["## The exact Ready rule against literal slots\n", "paper-14b, correlated lengths.\n"]
    for cell in cells:
        consume = "streamed" if cell["consume"] == "stream" else "whole batches"
        parts += [f"Bound {cell['staleness']}, {consume}:\n", variations(cell["rows"], "ledger")]
    return parts


def sensitivity(cells: list[Any]) -> list[str]:
    names = ("what", "bound", "policy", "tokens/s", "x best peer", "% limit", "% law", "binds", *PRICE)
    rows = [
        [
            cell["name"],
            f"{cell['staleness']}",
            row["policy"],
            speed(row),
            number(row["vs_best_bounded"]),
            f"{row['percent_of_limit']:.0f}",
            f"{row['percent_of_law']:.0f}",
            row["law_binds"],
            *price(row),
        ]
        for cell in cells
        for row in cell["rows"]
    ]
    return ["## Sensitivity\n", "paper-14b, correlated lengths, one split for all policies.\n", table(names, rows)]


def loses(section: Any) -> list[str]:
    names = ("bound", "policy", "GPUs r+t", "tokens/s", "x sync", *PRICE)
    rows = [
        [
            f"{row['staleness']}",
            row["policy"],
            f"{row['rollout_gpus']}+{row['training_gpus']}",
            speed(row),
            number(row["vs_synchronous"]),
            *price(row),
        ]
        for row in section["rows"]
    ]
    text = (
        "paper-32b on 4 GPUs, 16 groups a step, every response 1,000 tokens long. There is no tail to hide, and an "
        "instance takes 2 GPUs: the other 2 train for twice as long as all 4 would, while it has little to do.\n"
    )
    return [f"## {LOSES}\n", text, table(names, rows)]


def killed(section: Any) -> list[str]:
    text = f"Tokens that were made again: {section['made_again']:,.0f} on average over the runs.\n"
    setting = "paper-14b, correlated lengths, bound 2.\n"
    return ["## One instance killed\n", setting, variations(section["rows"], "what happens"), text]


def defaults(section: Any) -> list[str]:
    parts = ["## The defaults\n", "Ratio to the defaults, mean and least over the workloads and bounds.\n"]
    for name, found in section.items():
        parts.append(f"{name.capitalize()} {', '.join(found['workloads'])}:\n")
        rows = [[row["name"], f"{row['ratio']:.3f}", f"{row['worst']:.3f}"] for row in found["rows"]]
        parts.append(table(("strategies", "mean", "least"), rows))
    return parts


def predicted(results: Any) -> list[str]:
    parts = [
        "## The simulator against real runs\n",
        "Made by `bench/simulator_error.py`; on the GPU with `rollout.device=cuda training.device=cuda "
        "rollout.dtype=bfloat16`, trainer and both instances on the same one. Runs were made one after the other, "
        "those of a second seed last. If training the same tokens takes longer in them, the machine has changed, not "
        "the model; the JSON beside this document has the shares of the cores that each run got.\n",
    ]
    for where, found in results.items():
        parts += [f"### {where}\n", simulator_error.section(found)]
    return parts


PARTS: dict[str, Callable[[Any], list[str]]] = {
    "comparison": comparison,
    "ceilings": ceilings,
    "ablation": ablation,
    "chunks": chunks,
    "ready": ready,
    "sensitivity": sensitivity,
    "loses": loses,
    "killed": killed,
    "defaults": defaults,
    "predicted": predicted,
}
