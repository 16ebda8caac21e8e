"""Messages in a stream of bytes: MessagePack behind its length, nothing that could run code.

stream = framed(message, most=2**31)
for message in Frames(Kind, most=2**31).feed(stream): ...
"""

import struct
from typing import Any, Generic, TypeVar

import msgspec

HEAD = struct.Struct("<I")
Message = TypeVar("Message")

_encode = msgspec.msgpack.Encoder().encode


def framed(message: Any, most: int) -> bytes:
    body = _encode(message)
    if len(body) >= most:
        raise ValueError(f"a message of {len(body):,} bytes is over the limit of {most:,}: make it smaller")
    return HEAD.pack(len(body)) + body


class Frames(Generic[Message]):
    """Messages out of a stream that comes in pieces of any size."""

    def __init__(self, kind: Any, most: int) -> None:
        """``most``: a longer message is refused before memory is taken for it."""
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._most = most
        self._held = bytearray()
        """The beginning of a message whose end has not come."""

    def feed(self, data: bytes) -> list[Message]:
        """What is whole now. ``ValueError`` if it cannot be such messages (``msgspec``'s errors are that, too)."""
        held = self._held
        if not held:
            messages, at = self._read(data)
            held += data[at:]
            return messages
        held += data
        messages, at = self._read(held)
        del held[:at]
        return messages

    def _read(self, data: bytes | bytearray) -> tuple[list[Message], int]:
        """The messages that are whole, and where they end."""
        messages: list[Message] = []
        at, end, head = 0, len(data), HEAD.size
        with memoryview(data) as view:
            while end - at >= head:
                (size,) = HEAD.unpack_from(data, at)
                if size >= self._most:
                    raise ValueError(f"a message of {size:,} bytes was announced: the stream is damaged")
                after = at + head + size
                if after > end:
                    break
                messages.append(self._decode(view[at + head : after]))
                at = after
        return messages, at
