"""A weights store for other machines: its newest version over TCP, to those that know the token.

    with WeightService("127.0.0.1", "run-7", Path("weights.json")):     # beside the trainer; says there where it is
        ...

For each request a client gets the version and the header of the slot, says which bytes it lacks, and gets them. A slot
that is overwritten meanwhile ends the connection: the client has noticed by then, or the checksums tell it.
"""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash

from staleflow import tcp
from staleflow.servers.weights import LocalParameterServer, NoStoreError, WeightsError

ASK = struct.Struct("<q")
"""The newest version that the client has."""
ANSWER = struct.Struct("<qIQ")
"""The newest version, -1 if there is none; the bytes of the header that follows, none if that is no news; and its
checksum. A checksum of these follows."""
CHECK = struct.Struct("<Q")
RANGE = struct.Struct("<QQ")
PIECE = 4 << 20
"""Bytes between two renewals of the lease."""
MOST_RANGES = 1 << 20


class WeightService:
    def __init__(self, host: str, store: str, address: Path, registry: Path | None = None) -> None:
        self._store = store
        self._registry = registry
        self._token = tcp.token()
        self._listener = socket.create_server((host, 0))
        self._serving = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._serving.start()
        port: int = self._listener.getsockname()[1]
        tcp.write(address, tcp.Address(host, port, self._token, store))

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next client
        self._listener.close()
        self._serving.join()

    def __enter__(self) -> "WeightService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._attend, args=(end,), daemon=True).start()

    def _attend(self, end: socket.socket) -> None:
        """One client, until it leaves or a slot is overwritten."""
        with end, suppress(OSError, EOFError, WeightsError):
            end.settimeout(tcp.CONNECT_S)
            if not tcp.admitted(exactly(end, tcp.TOKEN_BYTES), self._token):
                return
            end.settimeout(None)
            tcp.attentive(end)
            server: LocalParameterServer | None = None
            try:
                while True:
                    (has,) = ASK.unpack(exactly(end, ASK.size))
                    with suppress(NoStoreError):  # the trainer has not made it yet
                        server = server or LocalParameterServer.attach(self._store, registry=self._registry)
                    if server is None or server.newest() <= has:
                        end.sendall(_answer(server.newest() if server is not None else -1, b""))
                    else:
                        server.lend_slot(partial(_send, end))
            finally:
                if server is not None:
                    server.detach()


def _answer(version: int, header: bytes | memoryview) -> bytes:
    first = ANSWER.pack(version, len(header), xxhash.xxh3_64_intdigest(header))
    return first + CHECK.pack(xxhash.xxh3_64_intdigest(first)) + header


def answered(end: socket.socket) -> bytes:
    """The header that comes; empty: there is no newer version."""
    first = exactly(end, ANSWER.size)
    (check,) = CHECK.unpack(exactly(end, CHECK.size))
    if xxhash.xxh3_64_intdigest(first) != check:
        raise EOFError("an answer came with another checksum")
    _, size, digest = ANSWER.unpack(first)
    header = bytes(exactly(end, size))
    if xxhash.xxh3_64_intdigest(header) != digest:
        raise EOFError("a header came with another checksum")
    return header


def _send(end: socket.socket, version: int, slot: memoryview, header: int, keep: Callable[[], bool]) -> None:
    end.sendall(_answer(version, slot[:header]))
    (count,) = ASK.unpack(exactly(end, ASK.size))
    if not 0 <= count <= MOST_RANGES:
        raise EOFError
    for start, stop in RANGE.iter_unpack(exactly(end, count * RANGE.size)):
        for at in range(start, stop, PIECE):
            if not keep():
                raise EOFError
            end.sendall(slot[at : min(at + PIECE, stop)])


def exactly(end: socket.socket, size: int) -> bytearray:
    """``EOFError`` if the connection ends before."""
    data = bytearray(size)
    fill(end, memoryview(data))
    return data


def fill(end: socket.socket, into: memoryview) -> None:
    while into:
        if not (came := end.recv_into(into)):
            raise EOFError
        into = into[came:]
