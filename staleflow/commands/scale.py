"""``staleflow scale``: more or fewer rollout instances while a run goes on.

staleflow scale runs/latest rollout=4         two more, if there were two
staleflow scale runs/latest rollout=1         the others are drained, then end: no token is lost
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from staleflow.commands.common import Subparsers
from staleflow.config import load
from staleflow.errors import ConfigError

WAIT_S = 120.0
"""How long the run may take to answer."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("scale", help="more or fewer rollout instances of a run that goes on")
    parser.add_argument("target", metavar="RUN", help="the run's directory, or its name among runs")
    parser.add_argument("change", metavar="rollout=N", help="how many rollout instances it is to have")
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from staleflow.run.directory import RunDirectory
    from staleflow.run.requests import ask

    wanted = instances(options.change)
    directory, _ = RunDirectory.existing(Path(options.target))
    load(str(directory.config_file), [f"rollout.instances={wanted}"])  # refuses what no run could have
    answer = ask(directory, {"rollout": wanted}, WAIT_S)
    print(json.dumps(answer) if options.json else answer["text"])
    return 0


def instances(change: str) -> int:
    """How many ``rollout=N`` asks for."""
    role, equals, number = change.partition("=")
    if not equals:
        raise ConfigError(f"{change!r} does not say how many: give rollout=N")
    if role != "rollout":
        raise ConfigError(f"{change}: {role!r} cannot be scaled: give rollout=N")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{change}: give a number of instances, 1 or more")
    return int(number)
