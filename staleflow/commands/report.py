"""``staleflow report``: a run as one self-contained HTML page.

staleflow report runs/latest                    writes runs/latest/report.html
staleflow report runs/latest --out report.html --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from staleflow.commands.common import Subparsers, add_run, check_output
from staleflow.files import write_whole
from staleflow.run.directory import RunDirectory


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write a run as one self-contained HTML page",
        description="Plots of learning, staleness, waste and time, the configuration, versions of packages, and how to "
        "make the run again. Works for runs that are finished, dead or alive.",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument("--out", metavar="FILE.html", help="where to (default: RUN/report.html)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from staleflow.study.report import page

    directory, config = RunDirectory.existing(Path(options.directory))
    path = check_output("--out", options.out or str(directory.report))
    write_whole(path, page(directory, config), mode=0o600)
    print(json.dumps({"report": str(path), "bytes": path.stat().st_size}) if options.json else path)
    return 0
