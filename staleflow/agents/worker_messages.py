"""The messages between the pool of environments and its workers: MessagePack with a length prefix.

for message in to_worker().feed(data): ...
"""

from typing import Any, Literal

import msgspec

from staleflow.agents.outcome import Outcome
from staleflow.frames import Frames, framed

MOST_BYTES = 256 * 2**20
"""A longer frame is refused before memory is taken for it."""


class Begin(msgspec.Struct, tag=True):
    """Play an episode."""

    number: int
    """Of this attempt, unique in the run of a pool."""
    name: str
    prompt: str | list[Any]
    facts: dict[str, Any]
    base_url: str
    api_key: str


class Over(msgspec.Struct, tag=True):
    """The phase that it is in has taken too long."""

    number: int


class Cancel(msgspec.Struct, tag=True):
    number: int


class Ready(msgspec.Struct, tag=True):
    """The first message of a worker."""

    why: str = ""
    """Why it cannot be used."""


class Entered(msgspec.Struct, tag=True):
    number: int
    phase: Literal["setup", "agent", "score"]


class Ended(msgspec.Struct, tag=True):
    """The last message about an episode."""

    number: int
    outcome: Outcome | None = None
    """None: it was cancelled."""


def pack(message: Begin | Over | Cancel | Ready | Entered | Ended) -> bytes:
    return framed(message, MOST_BYTES)


def to_worker() -> Frames[Begin | Over | Cancel]:
    return Frames(Begin | Over | Cancel, MOST_BYTES)


def from_worker() -> Frames[Ready | Entered | Ended]:
    return Frames(Ready | Entered | Ended, MOST_BYTES)
