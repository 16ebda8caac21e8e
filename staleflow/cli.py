"""The command line: ``staleflow COMMAND``.

What cannot be done is refused in one line, with exit code 2; why a run got stuck is one line with exit code 1.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from staleflow import __version__
from staleflow.commands import clean, compare, plan, profile, simulate, train
from staleflow.commands.common import refuse
from staleflow.errors import StaleFlowError


class Parser(argparse.ArgumentParser):
    """Prints what is wrong without repeating the usage, which ``--help`` shows."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"staleflow: error: {message}\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="staleflow", description="RL post-training under a strict staleness bound.")
    parser.add_argument("--version", action="version", version=f"staleflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (train, simulate, compare, plan, profile, clean):
        command.add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    if unknown := [each for each in rest if each.startswith("-") or "words" not in options]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; see staleflow {options.command} --help")
    if rest:  # argparse takes one run of positional arguments; between options there may be more
        options.words += rest
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.is_program = arguments is None
    """Whether this process exists for the command alone."""
    try:
        return options.run(options)
    except OSError as error:  # a full disk, a folder that is not ours
        return refuse(error)
    except StaleFlowError as error:
        return refuse(error, error.exit_code)
    except KeyboardInterrupt:
        return refuse("interrupted", train.INTERRUPTED)
