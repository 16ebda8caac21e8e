"""The decision behind a command, found in ``decisions.jsonl`` without decoding all of it.

found = decision_for(directory, "Pull", "i3")       # the latest; before=12.5: no later than that
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from staleflow.run.bounded_log import older
from staleflow.run.decisions import Decided
from staleflow.run.directory import RunDirectory

_decode = msgspec.json.Decoder(Decided).decode
SLACK_S = 0.5
"""A decision is recorded a little before what comes of it."""


def decisions_for(directory: RunDirectory, kind: str, name: str) -> Iterator[Decided]:
    """The decisions that commanded this of that trajectory, instance or group, latest first."""
    word = msgspec.json.encode([kind, name])[:-1]  # its list goes on, or ends here
    for path in (directory.decisions, older(directory.decisions)):
        if not path.exists():
            continue
        text = path.read_bytes()
        end = len(text)
        while (at := text.rfind(word, 0, end)) >= 0:
            begin = text.rfind(b"\n", 0, at) + 1
            stop = text.find(b"\n", at)
            end = begin
            try:
                found = _decode(text[begin : stop if stop >= 0 else len(text)])
            except msgspec.DecodeError:  # torn
                continue
            if any(command[:2] == [kind, name] for command in found.commands):
                yield found


def decision_for(directory: RunDirectory, kind: str, name: str, before: float = float("inf")) -> Decided | None:
    return next((each for each in decisions_for(directory, kind, name) if each.time <= before + SLACK_S), None)
