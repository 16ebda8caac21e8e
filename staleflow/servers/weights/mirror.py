"""The weights of a run on another machine than the trainer's: one copy on each, in its own shared memory.

    weights = MirroredWeights("run-7.node-3", Path("weights.json"))
    version = weights.pull(engine.state_dict(), at_least=4)

Whoever pulls a version first that is not here yet fetches it into the store of this machine; the others map that, as
they would the trainer's. Only what changed is sent. A version appears when every byte has the checksum that it was
pushed with: what came torn is fetched again, what came twice is no news. Neither the trainer nor those who pull an
older version wait. On the trainer's own machine, the store is the trainer's.

Whoever has fetched a version serves it, too. Where more machines ask than the trainer's sends to at a time, it names
one that has the version; if that one fails, the trainer's is asked again.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from staleflow import tcp
from staleflow.servers.weights import NoStoreError, WeightsError, reclaim
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.serving import (
    ASK,
    COUNT,
    ELSEWHERE,
    HAS,
    LOST,
    RANGE,
    WANTS,
    WeightService,
    answered,
    fill,
)

WAIT_S = 600.0
"""For a version that was announced. Its trainer may have died with its machine, and another makes it again."""
SILENT_S = 10.0
"""A transfer that stands still for this long is begun anew."""
LOOK_S = 0.02


class MirroredWeights:
    """Joined at the first pull; a copy in another process joins by itself."""

    def __init__(self, store: str, source: Path, wait_s: float = WAIT_S, registry: Path | None = None) -> None:
        """``store``: of this machine. ``source``: the file that says where the trainer's is."""
        self._store = store
        self._source = source
        self._wait_s = wait_s
        self._registry = registry
        self._server: LocalParameterServer | None = None
        self._link: tuple[tcp.Address, socket.socket] | None = None
        self.moved: Callable[[], None] = lambda: None
        """Called now and then while it waits."""
        self.fetched = 0
        """Bytes, by this object."""
        self._lost = False
        """Whether the machine that it was sent to last has failed."""
        self._service: WeightService | None = None
        """For other machines, once this object has fetched something."""

    def __reduce__(self) -> tuple[type["MirroredWeights"], tuple[str, Path, float, Path | None]]:
        return MirroredWeights, (self._store, self._source, self._wait_s, self._registry)

    def pull(self, into: Mapping[str, torch.Tensor], at_least: int) -> int:
        self.wait_for(at_least)
        assert self._server is not None
        return self._server.pull(into, at_least)

    def lend(self, use: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None], at_least: int) -> int:
        self.wait_for(at_least)
        assert self._server is not None
        return self._server.lend(use, at_least)

    def newest(self) -> int:
        """Of this machine."""
        if self._server is None:
            with suppress(NoStoreError):
                self._server = LocalParameterServer.attach(self._store, registry=self._registry)
        return self._server.newest() if self._server is not None else -1

    def close(self) -> None:
        """The last of a machine to leave takes the copy away."""
        self._hang_up()
        if self._service is not None:
            self._service.close()
        if self._server is not None:
            self._server.detach()
            reclaim(self._registry)

    def wait_for(self, at_least: int) -> None:
        """Until this machine has the version. 0: whatever is the newest, or the newest here if nobody answers.
        ``TimeoutError`` if it does not come."""
        until, why = time.monotonic() + self._wait_s, "nobody has said where the trainer is"
        known = at_least > 0  # that it is there: then the trainer need not be asked
        while not known or self.newest() < max(0, at_least):
            if (source := tcp.read(self._source)) is not None:
                try:
                    known |= source.about == self._store or self._fetch(source)
                    why = f"the newest at {source.host}:{source.port} is older"
                except (OSError, EOFError) as error:
                    self._hang_up()
                    known, why = True, f"{source.host}:{source.port}: {error or 'the transfer was torn'}"
                if known and self.newest() >= max(0, at_least):
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"version {at_least} did not come within {self._wait_s:g} s ({why})")
            self.moved()
            time.sleep(LOOK_S)

    def _fetch(self, source: tcp.Address) -> bool:
        """Bring this machine to the newest version. False: somebody else here does that now, or it has to wait."""
        end = self._dialled(source)
        if self.newest() < 0 and self._server is None:
            try:
                self._server = LocalParameterServer.create(self._store, registry=self._registry)
            except WeightsError:  # somebody else has, just now
                return False
        elif self._server is None or not self._server.take_up():
            return False
        try:
            end.sendall(ASK.pack(self._server.newest(), 0, LOST if self._lost else WANTS))
            self._lost = False
            version, told = answered(end)
            if version == ELSEWHERE:
                if not told:
                    return False
                host, _, port = told.decode().partition(" ")
                if not self._fetch_from(self._server, tcp.Address(host, int(port), source.token)):
                    self._lost = True
                    return False
            elif told:
                self.fetched += self._server.push_copy(told, partial(_receive, end)).copied
            if told:
                self._serve(end, source)
        finally:
            self._server.lay_down()
        return True

    def _fetch_from(self, server: LocalParameterServer, peer: tcp.Address) -> bool:
        """From another machine that is no trainer's. Whether it came."""
        try:
            with tcp.dial(peer) as end:
                end.settimeout(SILENT_S)
                end.sendall(ASK.pack(server.newest(), 0, WANTS))
                version, header = answered(end)
                if not header or version == ELSEWHERE:
                    return False
                self.fetched += server.push_copy(header, partial(_receive, end)).copied
        except (OSError, EOFError):
            return False
        return True

    def _serve(self, end: socket.socket, source: tcp.Address) -> None:
        """To others what is here now, at the address that the trainer's machine sees."""
        assert self._server is not None
        if self._service is None or self._service.token != source.token:
            if self._service is not None:
                self._service.close()
            host: str = end.getsockname()[0]
            self._service = WeightService(host, self._store, None, self._registry, source.token)
        end.sendall(ASK.pack(self._server.newest(), self._service.port, HAS))

    def _dialled(self, source: tcp.Address) -> socket.socket:
        if self._link is None or self._link[0] != source:
            self._hang_up()
            self._link = source, tcp.dial(source)
            self._link[1].settimeout(SILENT_S)
        return self._link[1]

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link[1].close()
            self._link = None


def _receive(end: socket.socket, ranges: list[tuple[int, int]], pieces: Iterator[memoryview]) -> None:
    end.sendall(COUNT.pack(len(ranges)) + b"".join(RANGE.pack(*each) for each in ranges))
    for piece in pieces:
        fill(end, piece)
