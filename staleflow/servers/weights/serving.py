"""A weights store for other machines: its newest version over TCP, to those that know the token.

    with WeightService("127.0.0.1", "run-7", Path("weights.json")):     # beside the trainer; says there where it is
        ...

For each request a client gets the version and the header of the slot, says which bytes it lacks, and gets them. A slot
that is overwritten meanwhile ends the connection: the client has noticed by then, or the checksums tell it. Where many
ask at a time they are sent to those who have it already (``Sharing``), who serve it in the same way.
"""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import xxhash

from staleflow import tcp
from staleflow.servers.weights import NoStoreError, WeightsError
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.sharing import OWN, Place, Sharing

ASK = struct.Struct("<qHB")
"""The newest version that the client has, the port at which it gives it to others, and one of these:"""
WANTS, HAS, LOST = range(3)
"""It asks for a newer one; it only says so, and gets no answer; it asks again, because who it was sent to failed."""
ANSWER = struct.Struct("<qIQ")
"""The newest version, -1 if there is none; the bytes of the header that follows, none if that is no news; and its
checksum. A checksum of these follows."""
ELSEWHERE = -2
"""Instead of a version: what follows is where to get it, host and port; nothing: ask again, all are busy."""
HOLD_S = 1.0
"""For this long a client is kept waiting for one that is free."""
COUNT = struct.Struct("<q")
CHECK = struct.Struct("<Q")
RANGE = struct.Struct("<QQ")
PIECE = 4 << 20
"""Bytes between two renewals of the lease."""
MOST_RANGES = 1 << 20


class WeightService:
    def __init__(
        self, host: str, store: str, address: Path | None, registry: Path | None = None, token: str = ""
    ) -> None:
        """``address``: where to write where it is. None: it is the copy of another node, whose clients are sent by the
        trainer's, and know the ``token``."""
        self._store = store
        self._registry = registry
        self.token = token or tcp.token()
        self.sent = 0
        """Bytes of weights."""
        self._sharing = Sharing() if address is not None else None
        self._changed = threading.Condition()
        """Held by whoever asks ``Sharing`` or tells it something."""
        self._clients = count()
        self._ends: dict[socket.socket, threading.Thread] = {}
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._serving = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._serving.start()
        self.port: int = self._listener.getsockname()[1]
        if address is not None:
            tcp.write(address, tcp.Address(host, self.port, self.token, store))

    def close(self) -> None:
        """Nobody is sent anything any more, and nothing holds the store."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next client
        self._listener.close()
        self._serving.join()
        for end, attending in list(self._ends.items()):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            attending.join()

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
            self._ends[end] = attending = threading.Thread(target=self._attend, args=(end,), daemon=True)
            attending.start()

    def _attend(self, end: socket.socket) -> None:
        """One client, until it leaves or a slot is overwritten."""
        client, server = next(self._clients), None
        try:
            with end, suppress(OSError, EOFError, WeightsError):
                end.settimeout(tcp.CONNECT_S)
                if not tcp.admitted(exactly(end, tcp.TOKEN_BYTES), self.token):
                    return
                end.settimeout(None)
                tcp.attentive(end)
                while True:
                    has, port, says = ASK.unpack(exactly(end, ASK.size))
                    self._hear(client, has, (end.getpeername()[0], port), says)
                    if says == HAS:
                        continue
                    with suppress(NoStoreError):  # the trainer has not made it yet
                        server = server or LocalParameterServer.attach(self._store, registry=self._registry)
                    newest = server.newest() if server is not None else -1
                    if server is None or newest <= has:
                        end.sendall(_answer(newest, b""))
                    elif (place := self._place(client, newest)) == OWN:
                        server.lend_slot(partial(self._send, end))
                    else:
                        end.sendall(_answer(ELSEWHERE, b"" if place is None else "{} {}".format(*place).encode()))
        finally:
            if server is not None:
                server.detach()
            if self._sharing is not None:
                with self._changed:
                    self._sharing.left(client)
                    self._changed.notify()
            self._ends.pop(end, None)

    def _hear(self, client: int, version: int, place: Place, says: int) -> None:
        """Whatever a client says, what it was sent before has come or will not."""
        if self._sharing is not None:
            with self._changed:
                if says == HAS:
                    self._sharing.has(client, version, place)
                elif says == LOST:
                    self._sharing.lost(client)
                else:
                    self._sharing.done(client)
                self._changed.notify(2)  # for who has it now, and for who sent it

    def _place(self, client: int, version: int) -> Place | None:
        """From where the client gets the version. Its place is taken until it says something again."""
        if self._sharing is None:
            return OWN
        with self._changed:
            place = self._sharing.ask(client, version)
            if place is None and self._changed.wait(HOLD_S):
                place = self._sharing.ask(client, version)
            return place

    def _send(self, end: socket.socket, version: int, slot: memoryview, header: int, keep: Callable[[], bool]) -> None:
        end.sendall(_answer(version, slot[:header]))
        (ranges,) = COUNT.unpack(exactly(end, COUNT.size))
        if not 0 <= ranges <= MOST_RANGES:
            raise EOFError
        for start, stop in RANGE.iter_unpack(exactly(end, ranges * RANGE.size)):
            for at in range(start, stop, PIECE):
                if not keep():
                    raise EOFError
                end.sendall(piece := slot[at : min(at + PIECE, stop)])
                self.sent += len(piece)


def _answer(version: int, header: bytes | memoryview) -> bytes:
    first = ANSWER.pack(version, len(header), xxhash.xxh3_64_intdigest(header))
    return first + CHECK.pack(xxhash.xxh3_64_intdigest(first)) + header


def answered(end: socket.socket) -> tuple[int, bytes]:
    """The version, or ``ELSEWHERE``, and what comes with it: the header, or where to go; empty: there is none."""
    first = exactly(end, ANSWER.size)
    (check,) = CHECK.unpack(exactly(end, CHECK.size))
    if xxhash.xxh3_64_intdigest(first) != check:
        raise EOFError("an answer came with another checksum")
    version, size, digest = ANSWER.unpack(first)
    header = bytes(exactly(end, size))
    if xxhash.xxh3_64_intdigest(header) != digest:
        raise EOFError("a header came with another checksum")
    return version, header


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
