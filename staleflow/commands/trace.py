"""``staleflow trace``: the timeline of a run for ui.perfetto.dev.

staleflow trace runs/latest                     writes runs/latest/trace.json
staleflow trace runs/latest --steps 10-20 --out slow.json
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from staleflow.commands.common import Subparsers, add_run, check_output
from staleflow.errors import ConfigError
from staleflow.run.directory import RunDirectory


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("trace", help="write the timeline of a run for ui.perfetto.dev", allow_abbrev=False)
    add_run(parser)
    parser.add_argument("--steps", metavar="FIRST-LAST", help="only these steps (default: all)")
    parser.add_argument("--out", metavar="FILE.json", help="where to (default: RUN/trace.json)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from staleflow.study.perfetto import write_trace

    first, last = steps_of(options.steps)
    directory, config = RunDirectory.existing(Path(options.directory))
    if not directory.journals:
        raise ConfigError(f"{options.directory} has no journal: wait until the run has begun")
    path = check_output("--out", options.out or str(directory.path / "trace.json"))
    events = write_trace(directory, path, first, last, config.staleness)
    shown = {"trace": str(path), "events": events, "bytes": path.stat().st_size}
    print(json.dumps(shown) if options.json else f"{path}: {events:,} events; open it at https://ui.perfetto.dev")
    return 0


def steps_of(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    if not (found := re.fullmatch(r"(\d+)(?:-(\d+))?", text)) or (found[2] and int(found[2]) < int(found[1])):
        raise ConfigError(f"--steps {text} is not a stretch of steps: give one such as 10-20")
    return int(found[1]), int(found[2] or found[1])
