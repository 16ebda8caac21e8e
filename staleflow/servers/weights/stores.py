"""Joining and leaving a weights store, with locks that show which processes are alive.

store = Store.create(StoreRegistry(None), "run-7", time.monotonic_ns)   # the trainer
store = Store.attach(StoreRegistry(None), "run-7", time.monotonic_ns)   # an instance
store.check()                                                           # raises once it is closed
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable

from staleflow.servers.weights.segments import BusyStoreError, NoStoreError, StoreRegistry, WeightsError, hold, let_go
from staleflow.servers.weights.slots import (
    CLOSED_WORD,
    FORMAT,
    FORMAT_WORD,
    MAGIC,
    SLOTS,
    WORDS,
    ClockNs,
    ControlBlock,
    segments_of,
)


class Store:
    """This process's hold on one store: its control block, and the locks that show that the process is alive."""

    def __init__(self, registry: StoreRegistry, name: str, fds: list[int], block: ControlBlock) -> None:
        self.registry = registry
        self.name = name
        self.block = block
        self.gone = ""
        """Why the store can no longer be used; empty while it can."""
        self._fds = fds
        self._writing = fds[0] if len(fds) > 1 else None
        """The writer's lock, if this process has had it."""
        _open_stores.add(self)

    @classmethod
    def create(cls, registry: StoreRegistry, name: str, clock: ClockNs) -> "Store":
        """A new store with this process as its writer, after reclaiming what dead runs left."""
        with registry.locked():
            registry.reclaim(segments_of)
            path = registry.control(name)
            if path.exists():
                raise WeightsError(
                    f"weights store {name!r} is in use: choose another name, stop the processes that hold it, or "
                    "take it over if its writer died"
                )
            writer = registry.open(registry.writer(name), create=True)
            hold(writer, fcntl.LOCK_EX)
            try:
                draft = path.with_suffix(".draft")
                draft.write_bytes(ControlBlock.blank())
                draft.replace(path)  # a death in between leaves nothing that looks like a store
                return cls._join(registry, name, clock, [writer])
            except BaseException:
                os.close(writer)
                registry.remove(name, [])
                raise

    @classmethod
    def take_over(cls, registry: StoreRegistry, name: str, clock: ClockNs) -> "Store":
        """Become the writer of a store whose writer died."""
        with registry.locked():
            cls._find(registry, name)
            writer = registry.open(registry.writer(name), create=True)
            if not hold(writer, fcntl.LOCK_EX):
                os.close(writer)
                raise BusyStoreError(f"weights store {name!r} has a living writer: stop it before taking over")
            try:
                return cls._join(registry, name, clock, [writer])
            except BaseException:
                os.close(writer)
                raise

    @classmethod
    def attach(cls, registry: StoreRegistry, name: str, clock: ClockNs) -> "Store":
        with registry.locked():
            cls._find(registry, name)
            return cls._join(registry, name, clock, [])

    @classmethod
    def _find(cls, registry: StoreRegistry, name: str) -> None:
        if not registry.control(name).exists():
            raise NoStoreError(
                f"there is no weights store {name!r} in {registry.folder}: create it first, or check name and registry"
            )

    @classmethod
    def _join(cls, registry: StoreRegistry, name: str, clock: ClockNs, fds: list[int]) -> "Store":
        """Map the control block and hold the store. Two descriptors, because a mapping keeps its own open: with one,
        the lock would outlive the closing of the file."""
        fd = registry.open(registry.control(name))
        try:
            if os.fstat(fd).st_size < WORDS * 8:
                raise WeightsError(f"{registry.control(name)} is not a weights store: remove it")
            words = memoryview(mmap.mmap(fd, WORDS * 8)).cast("q")
        finally:
            os.close(fd)
        if words[0] != MAGIC:
            raise WeightsError(f"{registry.control(name)} is not a weights store: remove it")
        if words[FORMAT_WORD] != FORMAT:
            raise WeightsError(
                f"weights store {name!r} has format {words[FORMAT_WORD]} and this program reads {FORMAT}: run the same "
                "release of staleflow on both sides"
            )
        if words[CLOSED_WORD]:
            raise WeightsError(f"weights store {name!r} was closed by its writer: create it again")
        held = registry.open(registry.control(name))
        hold(held, fcntl.LOCK_SH)
        return cls(registry, name, [*fds, held], ControlBlock(words, clock))

    def detach(self, why: str, let_go: Callable[[int], None] = let_go) -> None:
        """Leave the store, which stays for others."""
        if not self.gone:
            self.gone = why
            for fd in self._fds:
                let_go(fd)

    def take_up(self) -> bool:
        """Become the writer of a store that has none now."""
        with self.registry.locked():
            if self._writing is None:
                self._writing = self.registry.open(self.registry.writer(self.name), create=True)
                self._fds.append(self._writing)
            return hold(self._writing, fcntl.LOCK_EX)

    def lay_down(self) -> None:
        """Let another become the writer."""
        if self._writing is not None:
            fcntl.flock(self._writing, fcntl.LOCK_UN)

    def remove(self) -> None:
        """Take the store out of the registry and free its memory. Readers keep what they have mapped."""
        with self.registry.locked():
            self.block.close()
            self.registry.remove(self.name, [self.block.segment(slot) for slot in range(SLOTS)])

    def check(self) -> None:
        if self.gone:
            raise WeightsError(f"weights store {self.name!r} {self.gone}")
        if self.block.closed:
            raise WeightsError(
                f"weights store {self.name!r} was closed by its writer: attach to the store of the new run"
            )


_open_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child keeps its parent's locks while the files are open: a dead parent would seem alive."""
    for store in list(_open_stores):
        store.detach("belongs to the process that forked this one: attach to it here", os.close)


os.register_at_fork(after_in_child=_let_go_in_child)
