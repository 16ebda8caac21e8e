"""Which checkpoint a resume continues from, and why not from the newer ones.

    choice = choose(run.checkpoints)
    choice.folder           # the newest whole one; None if there is none
    choice.skipped          # newer ones that are damaged: (folder, what is wrong)
    set_aside(choice)       # so that they neither count as checkpoints nor are in the way

Nothing is started or written to find out. Every byte of the candidate is read once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from staleflow.errors import StaleFlowError
from staleflow.run.state import STATE, version_in
from staleflow.training.checksums import TRAINER, damage, sealed

_NAME = re.compile(r"step-(\d+)")
DAMAGED = "damaged-"


class Skipped(NamedTuple):
    folder: Path
    why: str

    def __str__(self) -> str:
        return f"checkpoint {self.folder} is damaged and left out: {self.why}"


@dataclass(frozen=True, slots=True)
class Choice:
    folder: Path | None
    skipped: tuple[Skipped, ...] = ()
    """Newest first."""

    @property
    def notes(self) -> list[str]:
        """What the user should know, one line each."""
        notes = [str(each) for each in self.skipped]
        if self.folder is not None and not sealed(self.folder):
            notes.append(f"checkpoint {self.folder} has no checksums: it is used as it is")
        return notes


def checkpoints(folder: Path) -> list[Path]:
    """Those of a run, whole or not, oldest first."""
    found = [(int(name[1]), each) for each in folder.glob("step-*") if (name := _NAME.fullmatch(each.name))]
    return [each for _, each in sorted(found)]


def newest(folder: Path) -> Path | None:
    """The latest by name, without a look inside."""
    return next(reversed(checkpoints(folder)), None)


def choose(folder: Path) -> Choice:
    skipped: list[Skipped] = []
    for candidate in reversed(checkpoints(folder)):
        if not (why := wrong_with(candidate)):
            return Choice(candidate, tuple(skipped))
        skipped.append(Skipped(candidate, why))
    return Choice(None, tuple(skipped))


def wrong_with(folder: Path) -> str:
    """Why a run cannot continue from this checkpoint; empty if it can."""
    if why := damage(folder):
        return why
    name = _NAME.fullmatch(folder.name)
    expected = int(name[1]) if name else -1
    try:
        trained = json.loads((folder / TRAINER).read_text())["version"]
        if trained != expected:
            return f"{TRAINER} is of version {trained}"
        if (version := version_in((folder / STATE).read_bytes())) != expected:
            return f"{STATE} is of version {version}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except StaleFlowError as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{TRAINER} cannot be read ({' '.join(str(error).split())})"
    return ""


def set_aside(choice: Choice) -> None:
    """Rename what was skipped. Otherwise the run would count it among the checkpoints to keep, and meet its name."""
    for folder, _ in choice.skipped:
        place = folder.with_name(f"{DAMAGED}{folder.name}")
        again = 2
        while place.exists():
            place = folder.with_name(f"{DAMAGED}{folder.name}-{again}")
            again += 1
        folder.rename(place)
