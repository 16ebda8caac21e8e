"""The command line: ``staleflow COMMAND``. What cannot be done is told in one line, with exit code 2."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from staleflow import __version__
from staleflow.commands import clean, compare, plan, profile, simulate, train


class Parser(argparse.ArgumentParser):
    """Says what is wrong without repeating the usage: ``--help`` is there for that."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"staleflow: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="staleflow", description="RL post-training under a strict staleness bound.")
    parser.add_argument("--version", action="version", version=f"staleflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train.add_parser(commands)
    simulate.add_parser(commands)
    compare.add_parser(commands)
    plan.add_parser(commands)
    profile.add_parser(commands)
    clean.add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    if unknown := [each for each in rest if each.startswith("-") or "overrides" not in options]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; see staleflow {options.command} --help")
    if rest:  # argparse takes one run of positional arguments; between options there may be more
        options.overrides += rest
    return options.run(options)
