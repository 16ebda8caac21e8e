"""Requests to a run that is alive, through its directory: whoever asks leaves a file, and the run answers with another.

    answer = ask(directory, {"rollout": 4}, timeout_s=120)      # RunError: not running, refused, or no answer in time

    requests = Requests(directory)                              # in the run
    for request in requests.take(): requests.answer(request, {"text": "instances 2 -> 4: i2, i3 started"})

Files are written whole, and only their user can read them. A request whose asker has given up waiting is not taken. One
that the run did not answer before its control plane died is taken by the next.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from staleflow.errors import RunError
from staleflow.files import write_whole
from staleflow.run.continuing import continuing, of_a_program, stored_reward
from staleflow.run.directory import RunDirectory

POLL_S = 0.1
AWAY_S = 30.0
"""A control plane that dies and is replaced is back by then."""
_ANSWER = ".answer"


class Request(msgspec.Struct, frozen=True):
    name: str
    values: dict[str, Any]
    until: float
    """By the clock on the wall: when the asker stops waiting."""


def ask(
    directory: RunDirectory,
    values: dict[str, Any],
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """What the run answers. ``RunError`` if it refuses, does not run, ends meanwhile or says nothing."""
    refuse_unless_running(directory)
    folder = directory.requests
    folder.mkdir(mode=0o700, exist_ok=True)
    request = Request(uuid.uuid4().hex, values, time.time() + timeout_s)
    asked, answered = folder / f"{request.name}.json", folder / f"{request.name}{_ANSWER}"
    try:
        write_whole(asked, msgspec.json.encode(request).decode(), mode=0o600)
        away_s = 0.0
        while time.time() < request.until:
            if answered.exists():
                return _told(json.loads(answered.read_text()))
            sleep(POLL_S)
            away_s = 0.0 if directory.running else away_s + POLL_S
            if away_s > AWAY_S:
                raise RunError(f"the run in {directory.path} ended before it answered")
        raise RunError(f"the run in {directory.path} has not answered within {timeout_s:g} s: see {directory.logs}")
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)


def refuse_unless_running(directory: RunDirectory) -> None:
    if not directory.running:
        how, reward = "give rollout.instances=N to train --resume", stored_reward(directory.path)
        if of_a_program(reward):
            how = f"give it in {continuing(directory.path, reward, 'rollout.instances=N')}"
        raise RunError(f"the run in {directory.path} is not running: {how}")


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    if why := answer.get("error"):
        raise RunError(why)
    return answer


class Requests:
    """The run's side."""

    def __init__(self, directory: RunDirectory) -> None:
        self._folder = directory.requests
        self._taken: set[str] = set()

    def take(self) -> list[Request]:
        """Those that have come since the last time."""
        try:
            found = [Path(each.path) for each in os.scandir(self._folder) if each.name.endswith(".json")]
        except FileNotFoundError:
            return []
        return [each for path in sorted(found) if (each := self._read(path)) is not None]

    def answer(self, request: Request, answer: dict[str, Any]) -> None:
        """To one who has stopped waiting, nothing."""
        if (self._folder / f"{request.name}.json").exists():
            write_whole(self._folder / f"{request.name}{_ANSWER}", json.dumps(answer), mode=0o600)

    def _read(self, path: Path) -> Request | None:
        if path.stem in self._taken:
            return None
        self._taken.add(path.stem)
        try:
            request = msgspec.json.decode(path.read_bytes(), type=Request)
        except (OSError, msgspec.DecodeError):  # withdrawn, or not one of ours
            return None
        answered = path.with_suffix(_ANSWER).exists()
        return request if request.name == path.stem and time.time() < request.until and not answered else None
