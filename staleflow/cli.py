"""The command line: ``staleflow COMMAND``.

What cannot be done is refused in one line, with exit code 2; why a run got stuck is one line with exit code 1.
"""

import argparse
import difflib
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from staleflow import __version__, caller
from staleflow.commands.common import as_setting, refuse
from staleflow.config.text import one_line
from staleflow.errors import INTERRUPTED, ConfigError, RunError, StaleFlowError
from staleflow.observe.output import Output, open_streams, unread

COMMANDS = (
    "train", "runs", "dash", "why", "report", "samples", "trace", "scale",
    "simulate", "compare", "plan", "profile", "evaluate", "doctor", "clean",
)  # fmt: skip
"""Each is a module of ``staleflow.commands``, with ``add_parser``."""

UNREAD = 128 + signal.SIGPIPE
"""The exit code of a command whose output is not read to its end: it is not an error of its own."""


class Parser(argparse.ArgumentParser):
    """Prints what is wrong without repeating the usage, which ``--help`` shows."""

    def error(self, message: str) -> NoReturn:
        sys.exit(refused(ConfigError(message)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="staleflow", description="RL post-training under a strict staleness bound.")
    parser.add_argument("--version", action="version", version=f"staleflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if arguments is None else arguments
    # Only what is needed is imported: a command should say soon what it does.
    if not words or not words[0].startswith("-"):
        check_command(parser, words)
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        import_module(f"staleflow.commands.{name}").add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    if unknown := [each for each in rest if each.startswith("-") or "words" not in options]:
        meant = as_setting(unknown[0]) if "words" in options else None
        see = meant or f"see staleflow {options.command} --help"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; {see}")
    if rest:  # argparse takes one run of positional arguments; between options there may be more
        options.words += rest
    return options


def check_command(parser: Parser, words: Sequence[str]) -> None:
    if not words:
        parser.error(f"no command is given: staleflow train begins a first run; others: {', '.join(COMMANDS[1:])}")
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        instead = f"write {near[0]}" if near else f"choose one of {', '.join(COMMANDS)}"
        parser.error(f"invalid choice: {words[0]!r} is not a command: {instead}")


def refused(error: StaleFlowError) -> int:
    """Printed, or left to be raised by the program that called the command."""
    kind, told = type(error), {"message": one_line(error)}
    if caller.tell(caller.ERROR, json.dumps(told | {"module": kind.__module__, "name": kind.__qualname__})):
        return error.exit_code
    return refuse(error, error.exit_code)


def stands_somewhere() -> bool:
    """Whether the working directory is still there."""
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def what_failed(error: OSError) -> str:
    """What the system refused, with what helps against it."""
    if error.errno == errno.EMFILE:
        return "too many files are open: raise the limit, as by ulimit -n 4096"
    if error.errno == errno.ENOENT and not stands_somewhere():
        return "the working directory was removed: change into one that is there"
    if error.errno == errno.ENAMETOOLONG:
        return f"the path {error.filename} is too long, or a name in it: give a shorter one"
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename} is not open to this user: give another path, or change who may use it"
    return str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    open_streams()
    options = parse(arguments)
    caller.end_with_it()
    options.is_program = arguments is None
    """Whether this process exists for the command alone."""
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except OSError as error:  # a full disk, a folder that is not ours
        return UNREAD if unread(sys.stdout) else refused(RunError(what_failed(error)))
    except StaleFlowError as error:
        return refused(error)
    except KeyboardInterrupt:
        return refuse("interrupted", INTERRUPTED)
    finally:
        Output(sys.stdout).flush()  # what is held back and cannot be written is no error of its own
