"""Messages in a stream of bytes: MessagePack behind its length, nothing that could run code.

stream = framed(message)
for message in Frames(Kind).feed(stream): ...
"""

import struct
from typing import Any, Generic, TypeVar

import msgspec

HEAD = 4
MOST_BYTES = 2**31
"""A longer message is refused before memory is taken for it."""
Message = TypeVar("Message")

_encode = msgspec.msgpack.Encoder().encode


def framed(message: Any, most: int = MOST_BYTES) -> bytes:
    body = _encode(message)
    if len(body) >= most:
        raise ValueError(f"a message of {len(body):,} bytes is over the limit of {most:,}: make it smaller")
    return struct.pack("<I", len(body)) + body


class Frames(Generic[Message]):
    """Messages out of a stream that comes in pieces of any size."""

    def __init__(self, kind: Any, most: int = MOST_BYTES) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._most = most
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """What is whole now. ``ValueError`` if it cannot be such messages (``msgspec``'s errors are that, too)."""
        held = self._held
        held += data
        messages: list[Message] = []
        at = 0
        while len(held) - at >= HEAD:
            (size,) = struct.unpack_from("<I", held, at)
            if size >= self._most:
                raise ValueError(f"a message of {size:,} bytes was announced: the stream is damaged")
            if len(held) - at - HEAD < size:
                break
            messages.append(self._decode(memoryview(held)[at + HEAD : at + HEAD + size]))
            at += HEAD + size
        del held[:at]
        return messages
