"""A small HTTP/1.1 server: requests in, answers or streams of events out, and whether somebody still listens.

    server = await Server(handle).start("127.0.0.1", 0)
    async def handle(asked: Asked, reply: Reply) -> None:
        await reply.send(200, b"{}")

h11 speaks the protocol; this moves the bytes. A handler that fails is an answer of 500, and its error is logged.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import h11

from staleflow.errors import ConfigError

MOST_BYTES = 64 << 20
"""Of one request."""
ARRIVES_S = 60.0
"""For a request to arrive, once it has begun."""
IDLE_S = 3600.0
"""For the next request over the same connection."""
CLOSES_S = 5.0
"""For connections to end."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    """By lower-case names."""
    body: bytes


class Reply:
    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connection, self._reader, self._writer = connection, reader, writer
        self.begun = False
        self.delivered = False
        """Whether all of it was written to somebody who was there."""

    @property
    def gone(self) -> bool:
        """Whether the other side has hung up."""
        return self._reader.at_eof() or self._writer.transport.is_closing()

    async def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        await self._write(self._head(status, fields), h11.Data(body), h11.EndOfMessage())
        self.delivered = not self.gone

    async def stream(self) -> None:
        await self._write(self._head(200, {"content-type": "text/event-stream", "cache-control": "no-store"}))

    async def event(self, text: bytes) -> None:
        """A piece of a stream, as it stands."""
        await self._write(h11.Data(text))

    async def end(self) -> None:
        await self._write(h11.EndOfMessage())
        self.delivered = not self.gone

    def _head(self, status: int, headers: dict[str, str]) -> h11.Response:
        self.begun = True
        return h11.Response(status_code=status, headers=list(headers.items()))

    async def _write(self, *events: h11.Event) -> None:
        """At once: whoever listens wakes up for each piece."""
        self._writer.write(b"".join(self._connection.send(event) or b"" for event in events))
        await self._writer.drain()


Handle = Callable[[Asked, Reply], Awaitable[None]]


class Server:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self, host: str, port: int) -> Self:
        try:
            self._server = await asyncio.start_server(self._serve, host, port, backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): give another port") from None
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._connections.values():
                writer.close()
            if self._connections:
                await asyncio.wait(self._connections, timeout=CLOSES_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        connection = h11.Connection(h11.SERVER)
        try:
            while (asked := await _next(connection, reader, writer)) is not None:
                await self._answer(asked, Reply(connection, reader, writer))
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
        except (OSError, TimeoutError, h11.LocalProtocolError):
            pass  # they hung up
        except h11.RemoteProtocolError as error:
            with suppress(Exception):
                await Reply(connection, reader, writer).send(error.error_status_hint, b"")
        finally:
            del self._connections[task]
            writer.close()

    async def _answer(self, asked: Asked, reply: Reply) -> None:
        try:
            await self._handle(asked, reply)
        except (OSError, h11.LocalProtocolError):
            raise
        except Exception:
            log.exception("%s %s failed", asked.method, asked.path)
            if not reply.begun:
                await reply.send(500, b'{"error": {"message": "internal error: see the log", "type": "server_error"}}')


async def _next(connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked | None:
    """The next request; None when there is none."""
    request: h11.Request | None = None
    body = bytearray()
    async with asyncio.timeout(IDLE_S) as limit:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                connection.receive_data(await reader.read(1 << 18))
                if request is None:
                    limit.reschedule(asyncio.get_running_loop().time() + ARRIVES_S)
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MOST_BYTES:
                    raise h11.RemoteProtocolError("too large", error_status_hint=413)
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
                path = request.target.decode("latin-1").partition("?")[0]
                return Asked(request.method.decode(), path, headers, bytes(body))
            else:
                return None
