"""Moments of ``fleet.jsonl``: the latest before a time, or some at even distances, without decoding all of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from staleflow.run.bounded_log import older
from staleflow.run.directory import RunDirectory
from staleflow.run.fleet import Moment

_decode = msgspec.json.Decoder(Moment).decode


def moments(directory: RunDirectory, latest_first: bool = False, most: int | None = None) -> Iterator[Moment]:
    """``most``: no more than these, at even distances."""
    lines: list[bytes] = []
    for path in (older(directory.fleet), directory.fleet):
        if path.exists():
            lines += path.read_bytes().split(b"\n")
    if most is not None and len(lines) > most:
        lines = [lines[at * len(lines) // most] for at in range(most)]
    for line in reversed(lines) if latest_first else lines:
        try:
            yield _decode(line)
        except msgspec.DecodeError:  # torn, or empty
            continue


def moment_before(directory: RunDirectory, time: float) -> Moment | None:
    return next((each for each in moments(directory, latest_first=True) if each.time <= time), None)
