"""``staleflow compare``: several policies on one workload, paired, as tables, as JSON or as a picture.

What cannot be compared is refused in one line, with exit code 2, before anything runs or is written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from staleflow.commands.common import (
    Subparsers,
    add_jobs,
    add_simulated,
    check_jobs,
    check_picture,
    console,
    given_settings,
    read_setting,
    refuse_stuck,
    write_picture,
)
from staleflow.errors import ConfigError
from staleflow.observe.progress import Progress
from staleflow.simulate.setting import assumptions
from staleflow.study.compare import Comparison, Row
from staleflow.study.compare_picture import picture
from staleflow.study.peers import POLICIES, STALEFLOW, chosen

if TYPE_CHECKING:
    from rich.table import Table


def whole_numbers(text: str) -> list[int]:
    """``1,2,3``, each once and in that order."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers; give such as 1,2,3") from None
    return list(dict.fromkeys(numbers))


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare policies on one simulated workload",
        description="Simulate several policies on the same workload, paired by seed, and compare them.",
        allow_abbrev=False,
    )
    add_simulated(parser, staleness=whole_numbers)
    parser.add_argument(
        "--policies",
        default="all",
        metavar="NAMES",
        help=f"with commas: {', '.join(POLICIES)}; NAME+stream or staleflow+batch for the other kind of consumption; "
        "all (default): each as it ships; every: both kinds",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    parser.add_argument("--seed", type=int, metavar="N", help="the first of the seeds (default: 0)")
    parser.add_argument(
        "--tune-split", action="store_true", help="give every policy the split of the GPUs that serves it best"
    )
    parser.add_argument("--faults", type=int, default=0, metavar="N", help="let N random faults happen in each run")
    add_jobs(parser)
    parser.add_argument("--picture", metavar="FILE.svg", help="write throughput against staleness, and timelines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    comparison, notes = read(options)
    path = check_picture(options.picture)
    with refuse_stuck(), Progress("compare") as progress:
        comparison.on_run, comparison.on_share = progress.say, progress.reach
        rows = comparison.rows()
        drawn = picture(comparison, rows) if path else ""
    if path:
        write_picture(path, drawn)
    if options.json:
        result = {"preset": comparison.setting.name, "limit_tokens_per_s": comparison.limit, "rows": rows}
        print(json.dumps(result | {"notes": notes}, allow_nan=False))
    else:
        show(comparison, rows, notes)
    return 0


def read(options: argparse.Namespace) -> tuple[Comparison, list[str]]:
    """The comparison, checked before anything runs, and what is assumed for it."""
    policies = chosen(options.policies)
    bounds, options.staleness = options.staleness, None
    wanted = given_settings(options)
    if bounds is not None and "staleness" in wanted.names:
        raise ConfigError("staleness is given twice: give --staleness or staleness=, not both")
    if options.seeds < 1:
        raise ConfigError(f"--seeds {options.seeds} is impossible: give 1 or more")
    if bounds is not None:
        wanted.words.append(f"staleness={min(bounds)}")
    config, setting = read_setting(options, wanted)
    peers = [policy.name for policy in policies if policy.base != STALEFLOW.name]
    for name, value in (("--faults ", options.faults), ("redundancy=", setting.redundancy)):
        if value < 0 or (value and peers):
            raise ConfigError(f"{name}{value} is impossible for {', '.join(peers or ['any'])}: give 0, or no peers")
    comparison = Comparison(
        setting,
        policies,
        bounds or [setting.staleness],
        range(config.seed, config.seed + options.seeds),
        tune=options.tune_split,
        faults=options.faults,
        jobs=check_jobs(options.jobs),
    )
    return comparison, [*in_turn(comparison), *assumptions(config, setting)]


def in_turn(comparison: Comparison) -> Iterator[str]:
    """What is assumed of policies whose GPUs generate and train in turn."""
    if any(policy.colocated for policy in comparison.policies):
        changes = comparison.setting.reshard_s
        said = f", and change roles in {changes:g} s of each step: give cluster.reshard_s" if changes else ""
        yield f"synchronous uses all GPUs for both in turn, so its GPUs are counted twice{said}"


# For people


def show(comparison: Comparison, rows: Sequence[Row], notes: Sequence[str]) -> None:
    out = console()
    setting, splits = comparison.setting, "tuned for each policy" if comparison.tune else "as given"
    out.print(
        f"{setting.name}: {setting.groups} groups x {setting.group_size}, {setting.steps} steps without the start, "
        f"{len(comparison.seeds)} seeds, {setting.gpus} GPUs, split {splits}. "
        f"No-bubble limit: {comparison.limit:,.0f} tokens/s."
    )
    for note in notes:
        out.print(f"Note: {note}.")
    for bound in comparison.bounds:
        mine = [row for row in rows if row["staleness"] == bound]
        out.print(speeds(bound, mine))
        out.print(causes(bound, mine))


def speeds(bound: int, rows: Sequence[Row]) -> Table:
    """How fast each policy is, and what it pays for that in staleness, waste or shorter responses."""
    from rich.table import Table

    table = Table(title=f"bound {bound}", title_justify="left")
    table.add_column("policy", no_wrap=True)
    names = ("GPUs r+t", "tokens/s", "± 95 %", "x sync", "x best", "% limit", "% law", "binds", "broken", "stale")
    for name in (*names, "wasted", "shift"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['rollout_gpus']}+{row['training_gpus']}",
            f"{row['trained_tokens_per_s']:,.0f}",
            _number(row["ci95"], ",.0f"),
            _number(row["vs_synchronous"], ".2f"),
            _number(row["vs_best_bounded"], ".2f"),
            f"{row['percent_of_limit']:.0f}",
            f"{row['percent_of_law']:.0f}",
            row["law_binds"],
            f"{row['violations']}",
            f"{row['mean_staleness']:.1f}/{row['max_staleness']}",
            f"{row['wasted_fraction']:.1%}",
            f"{row['length_shift']:.3f}",
        )
    return table


def causes(bound: int, rows: Sequence[Row]) -> Table:
    """Where the time and the tokens go."""
    from rich.table import Table

    table = Table(title=f"bound {bound}: where time and tokens go", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in ("trainer idle", "instances idle", "tokens by staleness", "wasted tokens", "lost/repeated"):
        table.add_column(name)
    table.add_column("wall s/step", justify="right")
    for row in rows:
        table.add_row(
            row["policy"],
            _shares(row["trainer_idle"]),
            _shares(row["instance_idle"]),
            _shares(row["staleness_histogram"]),
            ", ".join(f"{cause} {count:,}" for cause, count in row["wasted"].items()) or "none",
            f"{row['lost_groups']}/{row['repeated_groups']}",
            f"{row['wall_s_per_step']:.2f}",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _shares(parts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005) or "none"
