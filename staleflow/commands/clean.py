"""``staleflow clean``: find and remove what dead runs left on this machine.

staleflow clean --dry-run           what there is
staleflow clean --runs /data/runs   shared memory, and drafts in the run directories there
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from staleflow.config import Config
from staleflow.config.memory import gigabytes


def add_parser(commands: Any) -> None:
    default = Config()
    parser = commands.add_parser("clean", help="remove what dead runs left: shared memory, half-written files")
    parser.add_argument("--runs", type=Path, default=Path(default.runs), help="the folder of run directories")
    parser.add_argument("--cache", type=Path, default=Path(default.cache), help="the folder of models made here")
    parser.add_argument("--dry-run", action="store_true", help="say what there is, remove nothing")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from staleflow.run.leftovers import leftovers

    found = leftovers(options.runs, options.cache, remove=not options.dry_run)
    if options.json:
        print(json.dumps({"removed": not options.dry_run, "leftovers": [each._asdict() for each in found]}))
        return 0
    for kind, name, size in found:
        print(f"{kind:13}  {gigabytes(size):>10}  {name}")
    total = gigabytes(sum(each.bytes for each in found))
    print(f"{total} {'can be' if options.dry_run else 'were'} freed" if found else "dead runs left nothing here")
    return 0
