"""Files of results: one that cannot be written or continued is refused before anything is measured, and none is ever
half-written.

    parser.add_argument("--json", type=kept.to_write)         # replaced at the end
    parser.add_argument("--cells", type=kept.to_read)         # of another script
    parser.add_argument("--output", type=kept.to_continue)    # read to resume
    found = kept.read(given.output)                           # empty if it is not there yet
    kept.write(given.output, found)                           # whole or not at all; without a path nothing
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.errors import line_of
from staleflow.files import write_whole


def to_write(text: str) -> Path:
    """The path, for a file that will be replaced."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: {path.parent} is not a folder: make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file in it")
    return path


def to_read(text: str) -> Path:
    """The path, for a file of results by name that another script has written."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file: name one that this script reads")
    return to_continue(text)


def to_continue(text: str) -> Path:
    """The path, for a file whose results, by name, will be continued."""
    return _continued(text, dict)


def to_continue_list(text: str) -> Path:
    """The same for a file with a list of results."""
    return _continued(text, list)


def _continued(text: str, kind: Callable[[], Any]) -> Path:
    path = to_write(text)
    if path.is_file():
        try:
            found, why = json.loads(path.read_text()), "it is JSON of another kind"
        except (OSError, ValueError) as error:
            found, why = None, line_of(error)
        if type(found) is not kind:
            raise argparse.ArgumentTypeError(
                f"{path} has no results of this script ({why}): remove it, or name another"
            )
    return path


def read(path: Path | None) -> dict[str, Any]:
    """What is there, by name."""
    return json.loads(path.read_text()) if path is not None and path.is_file() else {}


def write(path: Path | None, found: Any) -> None:
    """What was there before stays if this cannot be written: the bench ends then, and is continued when it can."""
    if path is not None:
        try:
            write_whole(path, json.dumps(found, indent=1) + "\n")
        except OSError as error:
            print(f"{path} cannot be written ({line_of(error)}): make room, and start again", file=sys.stderr)
            raise SystemExit(2) from None
