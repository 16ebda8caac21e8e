"""Where a trainer writes down what a step was fed, for the one that takes its place. Light: others look for it."""

from pathlib import Path


def note_of(folder: Path, step: int) -> Path:
    return folder / f"fed-{step:012d}.msgpack"


def told_of(folder: Path) -> Path:
    """And what it said of the last step that its successor need not make again."""
    return folder / "told.msgpack"
