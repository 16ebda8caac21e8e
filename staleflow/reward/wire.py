"""What the pool and its workers say to each other: MessagePack behind its length, nothing that could run code.

frame = pack(Job(7, "2 + 2", "4", (), {"answer": "4"}))
job = unpack(frame[HEAD:], Job)
"""

import struct
from typing import Any, TypeVar

import msgspec

HEAD = 4
MOST_BYTES = 256 * 2**20
"""A longer frame is refused before memory is taken for it."""

Message = TypeVar("Message")


class Job(msgspec.Struct, array_like=True):
    number: int
    prompt: str | tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    facts: dict[str, Any]


class Answer(msgspec.Struct, array_like=True):
    """``number`` -1: the worker is ready, or cannot be and says why."""

    number: int
    reward: float | None = None
    why: str = ""


def pack(message: Job | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MOST_BYTES:
        raise ValueError(f"{len(body)} bytes are too much for a reward worker: the limit is {MOST_BYTES}")
    return struct.pack("<I", len(body)) + body


def size(head: bytes) -> int:
    (length,) = struct.unpack("<I", head)
    if length > MOST_BYTES:
        raise ValueError(f"a reward worker announced {length} bytes: the limit is {MOST_BYTES}")
    return length


def unpack(body: bytes, kind: type[Message]) -> Message:
    return msgspec.msgpack.decode(body, type=kind)
