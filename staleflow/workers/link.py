"""A worker's link to the control plane: it can send a message, and receive those that have come."""

import time
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from staleflow.types import Moved

SAY_S = 0.5
"""Signs of progress are no more frequent than this."""


class Gone(Exception):  # noqa: N818  # an event, not a mistake
    """The other end is closed: the run is over, or the control plane has died."""


class Link(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...

    def receive(self, timeout_s: float | None) -> Iterator[Any]:
        """Messages that have come, after waiting up to ``timeout_s`` for the first (None: without limit)."""
        ...


class Signs:
    """Signs of progress over a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._said_at = 0.0

    def move(self) -> None:
        if (now := time.perf_counter()) - self._said_at >= SAY_S:
            self._said_at = now
            self._link.send(Moved())
