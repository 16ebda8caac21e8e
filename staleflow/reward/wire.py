"""The messages between the pool and its workers: MessagePack with a length prefix, nothing that could run code.

frame = pack([Job(7, "2 + 2", {"answer": "4"}, tokens=b"", text="4")])
for batch in jobs().feed(frame): ...
"""

from typing import Any

import msgspec

from staleflow.frames import Frames, framed

READY = -1
MOST_BYTES = 256 * 2**20
"""A longer frame is refused before memory is taken for it."""


class Job(msgspec.Struct, array_like=True):
    number: int
    prompt: str | list[Any]
    """Text, token ids or messages."""
    facts: dict[str, Any]
    tokens: bytes
    """The response's tokens, little-endian int32."""
    text: str
    """The response's text, for workers that have no decoder."""
    cut: bool = False
    """Whether it was ended by a length limit."""


class Answer(msgspec.Struct, array_like=True):
    """With the number ``READY``: the worker is ready, or ``why`` it is not."""

    number: int
    reward: float | None = None
    why: str = ""
    away: bool = False
    """Not this response failed but a service that the reward needs: it is asked again later."""
    parts: tuple[float, ...] = ()
    """Where there are several rewards: each of them, in the order of the setting."""
    seconds: float = 0.0
    """That the worker took for it; 0 if no worker answered."""


def pack(message: list[Job] | Answer) -> bytes:
    return framed(message, MOST_BYTES)


def jobs() -> Frames[list[Job]]:
    return Frames(list[Job], MOST_BYTES)


def answers() -> Frames[Answer]:
    return Frames(Answer, MOST_BYTES)
