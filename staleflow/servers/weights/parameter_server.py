"""The parameter server of one machine: versioned weights in its shared memory, and no process of its own.

Its state is in ``slots``, ``stores`` and ``segments``, so trainer and instances need only the run's name:

    server = LocalParameterServer.create("run-7", dtype=torch.bfloat16)     # trainer
    server.push(0, model.state_dict())
    LocalParameterServer.attach("run-7").pull(engine.state_dict(), 0)       # instance: returns the version that landed
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from staleflow.servers.weights.parts import SharedPush
from staleflow.servers.weights.pulling import PullResult, Reader
from staleflow.servers.weights.pushing import Fetch, PushResult, Writer
from staleflow.servers.weights.segments import BusyStoreError, StoreRegistry, WeightsError
from staleflow.servers.weights.slots import ClockNs
from staleflow.servers.weights.stores import Store
from staleflow.servers.weights.tensors import Cast

LEASE_S = 10.0
"""How long a reader that hangs in the middle of a pull keeps a slot."""
MAX_SLOTS = 4
"""The published one, the next, and two for readers that are still copying older versions."""


class ParameterServer(Protocol):
    def push(self, version: int, tensors: Mapping[str, torch.Tensor]) -> PushResult | None:
        """Publish a version greater than all before. On an error nothing is published."""
        ...

    def newest(self) -> int:
        """The newest published version; -1 before the first."""
        ...

    def pull(self, into: Mapping[str, torch.Tensor], at_least: int) -> int:
        """Copy the newest version, which must be ``at_least`` that, into these tensors. Returns its number."""
        ...

    def close(self) -> None: ...


class LocalParameterServer:
    """Weights in the shared memory of one machine. Get one by ``create``, ``take_over`` or ``attach``."""

    def __init__(self, store: Store, writer: Writer | None, lease_s: float, between: Callable[[], None] | None) -> None:
        self._store = store
        self._writer = writer
        self._reader: Reader | None = None
        self._lease_s = lease_s
        self._between = between
        if writer is None:
            self._reader = Reader(store, lease_s, between)

    @classmethod
    def create(
        cls,
        name: str,
        *,
        registry: Path | str | None = None,
        dtype: Cast = None,
        max_slots: int = MAX_SLOTS,
        lease_s: float = LEASE_S,
        clock: ClockNs = time.monotonic_ns,
        between: Callable[[], None] | None = None,
    ) -> "LocalParameterServer":
        """A new store with this process as its writer. What dead runs left in the registry is reclaimed first.

        ``dtype`` is what floating-point tensors are stored as. ``between`` is called after each copied tensor."""
        store = Store.create(StoreRegistry(registry), name, clock)
        return cls._writing(store, dtype, max_slots, lease_s, between)

    @classmethod
    def take_over(
        cls,
        name: str,
        *,
        registry: Path | str | None = None,
        max_slots: int = MAX_SLOTS,
        lease_s: float = LEASE_S,
        clock: ClockNs = time.monotonic_ns,
        between: Callable[[], None] | None = None,
        wait_s: float = 0.0,
    ) -> "LocalParameterServer":
        """Become the writer of a store whose writer died; its newest version and its layout stay. If no reader holds
        it, ``create`` in another process may reclaim it first. Raises ``NoStoreError`` if there is none, and
        ``BusyStoreError`` if it has a writer, also after ``wait_s``: one that only fetches is soon done."""
        until = time.monotonic() + wait_s
        while True:
            try:
                store = Store.take_over(StoreRegistry(registry), name, clock)
                break
            except BusyStoreError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.02)
        return cls._writing(store, None, max_slots, lease_s, between)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        registry: Path | str | None = None,
        lease_s: float = LEASE_S,
        clock: ClockNs = time.monotonic_ns,
        between: Callable[[], None] | None = None,
    ) -> "LocalParameterServer":
        """An existing store, for reading, in any process of the machine."""
        store = Store.attach(StoreRegistry(registry), name, clock)
        try:
            return cls(store, None, lease_s, between)
        except BaseException:
            store.detach("could not be attached to")
            raise

    @classmethod
    def _writing(
        cls, store: Store, dtype: Cast, max_slots: int, lease_s: float, between: Callable[[], None] | None
    ) -> "LocalParameterServer":
        try:
            return cls(store, Writer(store, dtype, max_slots, between), lease_s, between)
        except BaseException:
            store.detach("could not be opened")
            raise

    def push(self, version: int, tensors: Mapping[str, torch.Tensor]) -> PushResult:
        self._store.check()
        if self._writer is None:
            raise WeightsError(f"weights store {self._store.name!r} is attached for reading: push from its writer")
        return self._writer.push(version, tensors)

    @staticmethod
    def together(
        server: "LocalParameterServer | None", gather: Callable[[Any], list[Any]], rank: int, size: int
    ) -> SharedPush:
        """Pushes by several processes, of which the first has the ``server`` that writes; see ``parts``."""
        return SharedPush(gather, rank, size, server._writer if server is not None else None)

    def take_up(self) -> bool:
        """Become the writer, until ``lay_down``, of a store that has none now. False if it has one. What was mapped
        before stays mapped, so this costs little."""
        self._store.check()
        if not self._store.take_up():
            return False
        if self._writer is None:
            self._writer = Writer(self._store, None, MAX_SLOTS, self._between)
        else:
            self._writer.recover()
        return True

    def lay_down(self) -> None:
        self._store.lay_down()

    def newest(self) -> int:
        self._store.check()
        return self._store.block.published.version

    def pull(self, into: Mapping[str, torch.Tensor], at_least: int = 0, *, verify: bool = False) -> int:
        """Copy the newest version into these tensors. Those that hold it already, from the previous pull, are skipped:
        call ``forget`` if anything else wrote to them. ``verify`` compares the checksums of what was copied. After an
        error the tensors may mix versions."""
        return self._reading().pull(into, at_least, verify).version

    def lend(self, use: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None], at_least: int = 0) -> int:
        """Call ``use`` with the newest version and its tensors where they are, in shared memory: for those who have
        another place for them than tensors of the same names. It is called again if they were overwritten meanwhile,
        and must not keep or change them. Returns the version that was read whole."""
        return self._reading().lend(use, at_least)

    def lend_slot(self, use: Callable[[int, memoryview, int, Callable[[], bool]], None], at_least: int = 0) -> int:
        """Call ``use`` with the newest version, the bytes of its slot, how many of them are the header, and a function
        to call now and then: it keeps the slot, and returns False once it was overwritten."""
        return self._reading().lend_slot(use, at_least)

    def push_copy(self, header: bytes, fetch: Fetch) -> PushResult:
        """Publish a slot that ``lend_slot`` gave elsewhere. ``EOFError`` if what comes is torn."""
        self._store.check()
        if self._writer is None:
            raise WeightsError(f"weights store {self._store.name!r} is attached for reading: push from its writer")
        return self._writer.push_copy(header, fetch)

    def whole(self) -> bool:
        """Whether every tensor of the newest version has the checksum that it was pushed with."""
        return self._reading().whole()

    def _reading(self) -> Reader:
        self._store.check()
        if self._reader is None:
            self._reader = Reader(self._store, self._lease_s, self._between)
        return self._reader

    @property
    def last_pull(self) -> PullResult | None:
        """The last pull of this object: bytes copied and skipped, attempts and checksum."""
        return self._reader.last if self._reader else None

    def forget(self) -> None:
        """Let the next pull copy everything: the engine's tensors were written by others, or are no longer used."""
        if self._reader:
            self._reader.forget()

    def detach(self) -> None:
        """Leave without removing anything: a writer leaves its versions to the one that takes over."""
        self._leave("is closed here: attach again")

    def close(self) -> None:
        """The writer removes the store and its memory; a reader leaves it. May be called again."""
        if self._writer and not self._store.gone:
            self._store.remove()
        self._leave("is closed: create it again" if self._writer else "is closed here: attach again")

    def _leave(self, why: str) -> None:
        if self._store.gone:
            return
        if self._reader:
            self._reader.close()
        if self._writer:
            self._writer.close()
        self._store.detach(why)

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_store") and not at_exit():
            self.detach()

    def __enter__(self) -> "LocalParameterServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
