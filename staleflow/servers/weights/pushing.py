"""The writer's side of a weights store: fill a slot that nobody needs, then publish it.

::

    choose a slot that is neither published nor leased      (or a new one; or, if all are read, the oldest)
    sequence odd -> copy what changed -> header -> sequence even -> publish

A writer never waits for a reader, and may be killed between any two instructions: the published slot is not touched,
and the next writer finds out what the others hold.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import xxhash

from staleflow.servers.weights.gpu import pin, store_from_gpu, unpin
from staleflow.servers.weights.segments import WeightsError, attach_segment, create_segment, ensure_room, unlink_segment
from staleflow.servers.weights.slots import SLOTS
from staleflow.servers.weights.stores import Store
from staleflow.servers.weights.tensors import CHUNK, Cast, SlotLayout, store_tensor

Fetch = Callable[[list[tuple[int, int]], Iterator[memoryview]], None]
"""Fills the memory that it is given in turn with the bytes of these ranges of the other slot."""
USUAL_SLOTS = 2
"""One published, one to write the next version to."""
IDLE_PUSHES = 2
"""After this many pushes that did not need it, a further slot is given back. Taking memory is slow, so not at once."""


@dataclass(frozen=True, slots=True)
class PushResult:
    version: int
    checksum: str
    copied: int
    """Bytes written to shared memory."""
    skipped: int
    """Bytes that the slot held already."""
    slots: int
    """Slots that exist now."""


@dataclass(slots=True)
class Slot:
    """A segment that this process writes, and the checksums of what it holds if they are known."""

    name: str
    memory: mmap.mmap
    views: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    digests: list[str] | None = None
    pinned: bool | None = None
    """None: nothing came from a GPU yet."""

    @property
    def bytes(self) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8)

    def pin(self) -> None:
        if self.pinned is None:
            self.pinned = pin(self.bytes.data_ptr(), len(self.memory))

    def unpin(self) -> None:
        if self.pinned:
            unpin(self.bytes.data_ptr())


class Writer:
    def __init__(self, store: Store, cast: Cast, max_slots: int, between: Callable[[], None] | None = None) -> None:
        if not USUAL_SLOTS <= max_slots <= SLOTS:
            raise WeightsError(f"max_slots is {max_slots}: use {USUAL_SLOTS} to {SLOTS}")
        self.store = store
        self.block = store.block
        self.cast: Cast = cast
        self.max_slots = max_slots
        self.layout: SlotLayout | None = None
        self._slots: dict[int, Slot] = {}
        self._idle = 0
        self._between = between
        self._scratch = torch.empty(CHUNK, dtype=torch.uint8)
        self.recover()

    def push(self, version: int, tensors: Mapping[str, torch.Tensor]) -> PushResult:
        self._refuse_older(version)
        if self.layout is None:
            self._start(SlotLayout.of(tensors, self.cast))
        else:
            self.layout.check(tensors)
        layout, number = self.begin()
        slot = self._slots[number]
        known, slot.digests = slot.digests, None
        with torch.inference_mode():  # whatever the mode was when the slot was made, its tensors can be written in it
            digests, copied = self._fill(layout, slot, tensors, known)
        return self.publish(version, number, digests, copied)

    def prepare(self, version: int, layout: Callable[[Cast], SlotLayout]) -> None:
        """For a version that others write to the slot: ``begin``, let them fill it, then ``publish``."""
        self._refuse_older(version)
        wanted = layout(self.cast)
        if self.layout is None:
            self._start(wanted)
        elif {entry.name: entry.shape for entry in wanted.entries} != {
            entry.name: entry.shape for entry in self.layout.entries
        }:
            raise WeightsError("these are not the tensors of the first push: start a new store for another model")

    def begin(self) -> tuple[SlotLayout, int]:
        """A slot for the next version. From here on its readers see that it is taken."""
        assert self.layout is not None
        number = self._choose(self.layout)
        self.block.begin(number)
        return self.layout, number

    def publish(self, version: int, number: int, digests: list[str], copied: int) -> PushResult:
        """The slot holds tensors with these checksums now."""
        assert self.layout is not None
        layout, slot = self.layout, self._slots[number]
        checksum = layout.checksum(digests)
        header = layout.header(version, checksum, digests)
        slot.memory[: len(header)] = header
        slot.digests = digests
        self.block.finish(number, version)
        self.block.publish(version, number)
        self._shrink()
        return PushResult(version, checksum, copied, layout.data - copied, len(self._slots))

    def push_copy(self, header: bytes, fetch: Fetch) -> PushResult:
        """Publish a slot of another machine, of which ``fetch`` brings the bytes that this one lacks. ``EOFError`` if
        they do not have the checksums of the header; then nothing is published."""
        layout = SlotLayout.parse(header)
        version, digests = layout.version_in(header), layout.split(header[layout.checksums])
        if self.layout is None:
            self._start(layout)
        number = self._choose(layout)
        slot = self._slots[number]
        self.block.begin(number)
        known, slot.digests = slot.digests or [""] * len(digests), None
        lacks = [
            (entry, digest)
            for entry, digest, held in zip(layout.entries, digests, known, strict=True)
            if digest != held and entry.stop > entry.start
        ]
        memory = memoryview(slot.memory)

        def pieces() -> Iterator[memoryview]:
            for entry, digest in lacks:
                hasher = xxhash.xxh3_64()
                for at in range(entry.start, entry.stop, CHUNK):
                    yield (piece := memory[at : min(at + CHUNK, entry.stop)])
                    hasher.update(piece)  # while it is in the cache
                if hasher.hexdigest() != digest:
                    raise EOFError(f"tensor {entry.name!r} came with another checksum")

        fetch(joined([(entry.start, entry.stop) for entry, _ in lacks]), pieces())
        memory[: len(header)] = header
        slot.digests = digests
        self.block.finish(number, version)
        self.block.publish(version, number)
        self._shrink()
        copied = sum(entry.stop - entry.start for entry, _ in lacks)
        return PushResult(version, layout.checksum(digests), copied, layout.data - copied, len(self._slots))

    def _refuse_older(self, version: int) -> None:
        newest = self.block.published.version
        if version <= newest or version < 0:
            raise WeightsError(
                f"version {version} cannot be pushed after version {newest}: versions only grow; "
                f"push {newest + 1} or later"
            )

    def close(self) -> None:
        for slot in self._slots.values():
            slot.unpin()
        self._slots.clear()

    def _fill(
        self, layout: SlotLayout, slot: Slot, tensors: Mapping[str, torch.Tensor], known: list[str] | None
    ) -> tuple[list[str], int]:
        numbered = [(number, entry, tensors[entry.name]) for number, entry in enumerate(layout.entries)]
        on_gpu = [each for each in numbered if each[2].is_cuda and each[2].numel()]
        if on_gpu:
            slot.pin()
        digests = store_from_gpu(slot.bytes, on_gpu) if on_gpu else {}
        copied = sum(entry.stop - entry.start for _, entry, _ in on_gpu)
        for number, entry, tensor in numbered:
            if number not in digests:
                held = known[number] if known is not None else None
                digests[number], moved = store_tensor(slot.views[number], tensor, held, self._scratch)
                if moved:
                    copied += entry.stop - entry.start
            if self._between is not None:
                self._between()
        return [digests[number] for number in range(len(numbered))], copied

    # Slots

    def _start(self, layout: SlotLayout) -> None:
        """Take the memory for the usual slots at once: the first push pays, and the second is as fast as the rest."""
        ensure_room(USUAL_SLOTS * layout.size)
        try:
            for number in range(USUAL_SLOTS):
                self._allocate(number, layout)
        except BaseException:
            for number in list(self._slots):
                self._free(number)
            raise
        self.layout = layout

    def _choose(self, layout: SlotLayout) -> int:
        """A slot to write: unread if there is one, then a new one, then the one whose readers are furthest behind."""
        others = [number for number in self._slots if number != self.block.published.slot]
        leased = self.block.leased()
        unread = [number for number in others if number not in leased]
        if unread:
            return max(unread, key=self.block.version)  # the nearest to the new version: least to copy
        if len(self._slots) < self.max_slots:
            number = next(number for number in range(SLOTS) if number not in self._slots)
            try:
                self._allocate(number, layout)
            except WeightsError:
                pass  # no memory for a further one: take one that is being read
            else:
                return number
        return min(others, key=self.block.version)

    def _shrink(self) -> None:
        """Give back slots beyond the usual ones when they have not been needed for a while."""
        leased = self.block.leased()
        unread = [number for number in self._slots if number != self.block.published.slot and number not in leased]
        self._idle = self._idle + 1 if len(unread) >= USUAL_SLOTS else 0
        if self._idle >= IDLE_PUSHES:
            self._free(min(unread, key=self.block.version))

    def _allocate(self, number: int, layout: SlotLayout) -> None:
        unlink_segment(self.block.segment(number))  # of a writer that was killed while it gave the slot back
        self.block.begin(number)  # nothing is in it until the first push to it ends
        name = self.block.next_generation(number)
        memory = create_segment(name, layout.size)
        self.block.set_size(number, layout.size)
        slot = self._slots[number] = Slot(name, memory)
        slot.views = layout.views(slot.bytes)

    def _free(self, number: int) -> None:
        self.block.begin(number)
        self.block.set_size(number, 0)
        unlink_segment(self.block.segment(number))
        self._slots.pop(number).unpin()

    def recover(self) -> None:
        """Continue from what an earlier writer left. What it was writing when it died is rewritten by the next push."""
        published = self.block.published
        names = {number: self.block.segment(number) for number in self.block.allocated()}
        for number in [each for each, slot in self._slots.items() if names.get(each) != slot.name]:
            self._slots.pop(number).unpin()
        for number, name in names.items():
            memory = self._slots[number].memory if number in self._slots else attach_segment(name)
            if memory is not None:
                self._slots.setdefault(number, Slot(name, memory))
            elif number == published.slot:
                raise WeightsError(
                    f"the memory of version {published.version} of store {self.store.name!r} is gone: start a new store"
                )
        if published.slot < 0:
            for number in list(self._slots):
                self._free(number)
            return
        memory = self._slots[published.slot].memory
        self.layout = self.layout or SlotLayout.parse(memory[: 8 + int.from_bytes(memory[:8], "little")])
        for number, slot in self._slots.items():
            slot.views = slot.views or self.layout.views(slot.bytes)
            whole = not self.block.sequence(number) & 1
            slot.digests = self.layout.split(slot.memory[self.layout.checksums]) if whole else None


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
