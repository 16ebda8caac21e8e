"""``staleflow runs``: the runs in a folder, newest first, with their state, result and size.

staleflow runs                      those in runs/
staleflow runs --runs /data/runs --json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec

from staleflow.commands.common import Subparsers, console
from staleflow.config import Config
from staleflow.config.memory import gigabytes
from staleflow.run.listing import Listed, listed


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("runs", help="list runs: state, progress, result, size", allow_abbrev=False)
    parser.add_argument("--runs", type=Path, default=Path(Config().runs), help="the folder of run directories")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    found = listed(options.runs)
    if options.json:
        print(json.dumps({"runs": msgspec.to_builtins(found)}))
    elif not found:
        print(f"there are no runs in {options.runs}: staleflow train makes one")
    else:
        _print(found)
    return 0


def _print(found: list[Listed]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, side in (("run", "left"), ("state", "left"), ("steps", "right"), ("held-out", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for name in ("reward", "trained for", "size", "changed"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        alive = each.state == "running"
        table.add_row(
            f"[bold]{each.name}[/]" if alive else each.name,
            f"[green]{each.state}[/]" if alive else each.state,
            f"{each.step}/{'?' if each.steps is None else each.steps}",
            "-" if each.accuracy is None else f"{each.accuracy:.3f}",
            "-" if each.reward is None else f"{each.reward:.3f}",
            "-" if each.seconds is None else f"{each.seconds:,.0f} s",
            gigabytes(each.bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(each.changed)),
        )
    console().print(table)
