"""The two ends of a socket between the control plane and one process of the run.

The process works between two looks at its end (``LastingLink``); the control plane's end (``Channel``) belongs to its
event loop. Neither end can block the other for long: the control plane never waits to send.

A process outlives the control plane. It keeps what it has said until it hears that what came of it is durable
(``Kept``). When its connection ends it continues to work, connects again as soon as somebody listens, and says all of
that again; if nobody does for ``AWAY_S``, it ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from staleflow import tcp
from staleflow.frames import Frames, framed
from staleflow.readable import readable
from staleflow.runtime.local.patience import PatientLoop
from staleflow.types import FromProcess, Hello, Kept, Setup, ToProcess
from staleflow.workers.link import Gone

PIECE = 1 << 20
AWAY_S = 120.0
"""How long a process waits for another control plane before it ends."""
RETRY_S = 0.1
"""How often it tries to connect meanwhile."""


class SocketLink:
    """One connection of a process: blocking to send, and looked at between two pieces of work."""

    def __init__(self, end: socket.socket, kinds: object) -> None:
        self._socket = end
        self._socket.setblocking(True)
        self._frames: Frames[Any] = Frames(kinds)
        self._came: deque[Any] = deque()
        """Messages that nobody has taken yet."""

    def send(self, message: msgspec.Struct) -> None:
        self.send_packed(framed(message))

    def send_packed(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def receive(self, timeout_s: float | None) -> Iterator[Any]:
        """What has come, waiting up to ``timeout_s`` for the first message (None: for as long as it takes)."""
        if not self._came and readable([self._socket.fileno()], timeout_s):
            try:
                data = self._socket.recv(PIECE)
            except ConnectionResetError:
                raise Gone from None
            if not data:
                raise Gone
            self._came += self._frames.feed(data)
        while self._came:
            yield self._came.popleft()

    def close(self) -> None:
        self._socket.close()


class LastingLink:
    """A process's end, over one connection after the other. ``Gone`` once there has been none for ``away_s``."""

    def __init__(
        self,
        path: str,
        name: str,
        incarnation: int,
        away_s: float = AWAY_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = path
        self._name = name
        self._incarnation = incarnation
        self._away_s = away_s
        self._clock = clock
        self._sleep = sleep
        self._link: SocketLink | None = None
        self._set_up = False
        self._said: deque[bytes] = deque()
        """What is to be said again over the next connection."""
        self._first = 1
        """The number of the first of these."""
        self._away_since = clock()
        self._tried_at = float("-inf")

    def send(self, message: msgspec.Struct) -> None:
        data = framed(message)
        self._said.append(data)
        if self._link is not None:
            with suppress(Gone):  # ``receive`` finds that out as well, after what had still come
                self._link.send_packed(data)

    def receive(self, timeout_s: float | None) -> Iterator[Any]:
        """What has come. Connections are changed here only: what came over one has been taken before the next."""
        until = float("inf") if timeout_s is None else self._clock() + timeout_s
        while True:
            left = until - self._clock()
            if self._link is None and not self._connect():
                if left <= 0:
                    return
                self._sleep(min(RETRY_S, left))
                continue
            assert self._link is not None
            only_kept = False
            try:
                for message in self._link.receive(None if left == float("inf") else max(0.0, left)):
                    if isinstance(message, Kept):
                        self._forget(message.number)
                        only_kept = True
                    else:
                        self._set_up |= isinstance(message, Setup)
                        only_kept, until = False, float("-inf")
                        yield message
            except Gone:
                self._link.close()
                self._link, self._away_since, self._tried_at = None, self._clock(), float("-inf")
                continue
            if not only_kept:
                return

    def _connect(self) -> bool:
        now = self._clock()
        if now - self._tried_at < RETRY_S:
            return False
        if now - self._away_since > self._away_s:
            raise Gone
        self._tried_at = now
        hello = Hello(self._name, self._incarnation, os.getpid(), self._set_up, self._first)
        try:
            end = dial(self._path)
        except OSError:
            return False
        try:
            end.sendall(b"".join((framed(hello), *self._said)))
        except OSError:
            end.close()
            return False
        self._link = SocketLink(end, ToProcess)
        return True

    def _forget(self, number: int) -> None:
        while self._said and self._first <= number:
            self._said.popleft()
            self._first += 1


def dial(path: str) -> socket.socket:
    """``path``: a socket of this machine, or a file that says where the control plane listens (``tcp``)."""
    if path.endswith(tcp.SUFFIX):
        if (address := tcp.read(Path(path))) is None:
            raise FileNotFoundError(path)
        return tcp.dial(address)
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(path)
    except OSError:
        end.close()
        raise
    return end


class Channel(asyncio.Protocol):
    """The control plane's end: calls ``on_message`` for each message, and ``on_end`` once there will be no more."""

    def __init__(self, on_hello: Callable[[Channel, Hello], None], token: str = "") -> None:
        """``on_hello`` says who is there, and sets the other two. ``token``: what must come first."""
        self.on_message: Callable[[Any], None] = lambda _: None
        self.on_end: Callable[[], None] = lambda: None
        self.heard = 0
        """Messages of the process, as it counts them."""
        self._frames: Frames[Any] = Frames(FromProcess)
        self._on_hello = on_hello
        self._token = token
        self._said = b""
        """Of the token, so far."""
        self._transport: asyncio.Transport | None = None

    def send(self, message: msgspec.Struct) -> None:
        """To a process that has died it does nothing: ``on_end`` tells of that."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    def hurry(self) -> None:
        """Somebody waits for what is said here: it is heard at once."""
        if self._transport is not None and isinstance(loop := asyncio.get_running_loop(), PatientLoop):
            loop.hurry(self._transport.get_extra_info("socket").fileno())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._token:
            tcp.attentive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._token:
            data, missing = self._said + data, tcp.TOKEN_BYTES
            self._said = data[:missing]
            if len(data) < missing:
                return
            if not tcp.admitted(self._said, self._token):
                self.close()
                return
            self._token, data = "", data[missing:]
        for message in self._frames.feed(data):
            if isinstance(message, Hello):
                self.heard = message.first - 1
                self._on_hello(self, message)
            else:
                self.heard += 1
                self.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # however it ended, it ended
        self.on_end()


async def listen(path: Path, on_hello: Callable[[Channel, Hello], None]) -> asyncio.Server:
    """Let processes of this user connect. One that listened here before is dead: its run is ours."""
    path.unlink(missing_ok=True)
    server = await asyncio.get_running_loop().create_unix_server(lambda: Channel(on_hello), str(path))
    os.chmod(path, 0o600)
    return server
