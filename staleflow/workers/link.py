"""A worker's link to the control plane: it can send a message, and receive those that have come."""

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec


class Gone(Exception):  # noqa: N818  # an event, not a mistake
    """The other end is closed: the run is over, or the control plane has died."""


class Link(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...

    def receive(self, timeout_s: float | None) -> Iterator[Any]:
        """Messages that have come, after waiting up to ``timeout_s`` for the first (None: without limit)."""
        ...
