"""Links between machines: who does not know the token is not heard, and a control plane may come back elsewhere."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from staleflow import tcp
from staleflow.frames import framed
from staleflow.runtime.local.link import Channel, LastingLink
from staleflow.types import Hello, Moved, Stop

TOKEN = "t" * tcp.TOKEN_BYTES


class Door:
    """A control plane that listens, and says where."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.hellos: list[Hello] = []
        self.heard: list[Any] = []
        self.channels: list[Channel] = []

    async def open(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Channel(self._arrived, TOKEN), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        tcp.write(self._path, tcp.Address(host, port, TOKEN))
        return server

    def _arrived(self, channel: Channel, hello: Hello) -> None:
        self.hellos.append(hello)
        self.channels.append(channel)
        channel.on_message = self.heard.append
        channel.send(Stop())


async def until(done: Any) -> None:
    async with asyncio.timeout(30):
        while not done():
            await asyncio.sleep(0.01)


def test_a_process_finds_the_next_control_plane_where_the_file_says(tmp_path: Path) -> None:
    """Even on another port, and says again what was not kept."""
    path = tmp_path / "control.json"
    link = LastingLink(str(path), "i0", 1)
    link.send(Moved(7))

    async def control(door: Door) -> None:
        server = await door.open()
        came: list[Any] = []
        await until(lambda: came.extend(link.receive(0.0)) or came)
        await until(lambda: door.heard)
        for channel in door.channels:
            channel.close()
        server.close()

    for _ in range(2):
        asyncio.run(control(door := Door(path)))
        assert [(each.name, each.first) for each in door.hellos] == [("i0", 1)]
        assert door.heard == [Moved(7)]


@pytest.mark.parametrize("said", [b"u" * tcp.TOKEN_BYTES, b"t" * (tcp.TOKEN_BYTES - 1) + b"u", b""])
def test_who_does_not_know_the_token_is_not_heard(tmp_path: Path, said: bytes) -> None:
    async def control() -> None:
        server = await (door := Door(tmp_path / "control.json")).open()
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(said + framed(Hello("i0", 1, 1, False, 1)) + b"x" * tcp.TOKEN_BYTES)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
        assert not door.hellos
        server.close()

    asyncio.run(control())


def test_an_address_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    tcp.write(path := tmp_path / "control.json", address := tcp.Address("127.0.0.1", 1, tcp.token()))
    assert path.stat().st_mode & 0o077 == 0
    assert tcp.read(path) == address
    path.write_text("{")
    assert tcp.read(path) is None


def test_a_peer_that_vanishes_is_noticed() -> None:
    with socket.socket() as end:
        tcp.attentive(end)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == tcp.SILENT_S * 1000
