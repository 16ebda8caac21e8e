"""The two ends of a socket between the control plane and one process of the run.

The process works between two looks at its end (``SocketLink``); the control plane's end (``Channel``) belongs to its
event loop. Neither end can block the other for long: the control plane never waits to send.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from staleflow.frames import Frames, framed
from staleflow.workers.link import Gone

PIECE = 1 << 20
MOST_BYTES = 2**31
"""A longer message is refused before memory is taken for it."""


def pack(message: msgspec.Struct) -> bytes:
    return framed(message, MOST_BYTES)


def unpacker(kinds: object) -> Frames[Any]:
    return Frames(kinds, MOST_BYTES)


class SocketLink:
    """A process's end: blocking to send, and looked at between two pieces of work."""

    def __init__(self, end: socket.socket, kinds: object) -> None:
        self._socket = end
        self._socket.setblocking(True)
        self._unpacker = unpacker(kinds)
        self._came: deque[Any] = deque()
        """Messages that nobody has taken yet."""

    def send(self, message: msgspec.Struct) -> None:
        try:
            self._socket.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def receive(self, timeout_s: float | None) -> Iterator[Any]:
        """What has come, waiting up to ``timeout_s`` for the first message (None: for as long as it takes)."""
        if not self._came and select.select([self._socket], [], [], timeout_s)[0]:
            try:
                data = self._socket.recv(PIECE)
            except ConnectionResetError:
                raise Gone from None
            if not data:
                raise Gone
            self._came += self._unpacker.feed(data)
        while self._came:
            yield self._came.popleft()


class Channel(asyncio.Protocol):
    """The control plane's end: calls ``on_message`` for each message, and ``on_end`` once there will be no more."""

    def __init__(self, kinds: object, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._unpacker = unpacker(kinds)
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, end: socket.socket, kinds: object, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> Channel:
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(kinds, on_message, on_end), sock=end)
        return channel

    def send(self, message: msgspec.Struct) -> None:
        """To a process that has died it does nothing: ``on_end`` tells of that."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # however it ended, it ended
        self._on_end()
