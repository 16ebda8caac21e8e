"""Where a trainer writes down what a step was fed, for the one that takes its place. Light: others look for it."""

from pathlib import Path


def note_of(folder: Path, step: int) -> Path:
    return folder / f"fed-{step:012d}.msgpack"
