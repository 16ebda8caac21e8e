"""What the pool and its workers say to each other: MessagePack behind its length, nothing that could run code.

frame = pack([Job(7, "2 + 2", {"answer": "4"}, tokens=b"", text="4")])
for jobs in Frames(list[Job]).feed(frame): ...
"""

import struct
from typing import Any, Generic, TypeVar

import msgspec

HEAD = 4
READY = -1
MOST_BYTES = 256 * 2**20
"""A longer frame is refused before memory is taken for it."""

Message = TypeVar("Message")


class Job(msgspec.Struct, array_like=True):
    number: int
    prompt: str | tuple[int, ...]
    facts: dict[str, Any]
    tokens: bytes
    """Of the response: little-endian int32."""
    text: str
    """Of the response, for workers that have no decoder."""


class Answer(msgspec.Struct, array_like=True):
    """``READY`` as the number: the worker is ready, or cannot be and says why."""

    number: int
    reward: float | None = None
    why: str = ""


_encode = msgspec.msgpack.Encoder().encode


def pack(message: list[Job] | Answer) -> bytes:
    body = _encode(message)
    if len(body) > MOST_BYTES:
        raise ValueError(f"{len(body)} bytes are too much for a reward worker: the limit is {MOST_BYTES}")
    return struct.pack("<I", len(body)) + body


class Frames(Generic[Message]):
    """Messages out of a stream of bytes that comes in pieces of any size."""

    def __init__(self, kind: type[Message]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._held = b""

    def feed(self, data: bytes) -> list[Message]:
        """What is whole now. ``ValueError`` if it cannot be such messages (``msgspec``'s errors are that, too)."""
        held = self._held + data if self._held else data
        messages: list[Message] = []
        at, end = 0, len(held)
        while end - at >= HEAD:
            (size,) = struct.unpack_from("<I", held, at)
            if size > MOST_BYTES:
                raise ValueError(f"a reward worker announced {size} bytes: the limit is {MOST_BYTES}")
            if end - at - HEAD < size:
                break
            messages.append(self._decode(held[at + HEAD : at + HEAD + size]))
            at += HEAD + size
        self._held = held[at:]
        return messages
