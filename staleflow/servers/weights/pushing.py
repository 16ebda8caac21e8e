"""The writer's side of a weights store: fill a slot that nobody needs, then publish it.

::

    choose a slot that is neither published nor leased      (or a new one; or, if all are read, the oldest)
    sequence odd -> copy what changed -> header -> sequence even -> publish

A writer never waits for a reader, and may be killed between any two instructions: the published slot is not touched,
and the next writer finds out what the others hold.
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from staleflow.servers.weights.gpu import pin, store_from_gpu, unpin
from staleflow.servers.weights.segments import WeightsError, attach_segment, create_segment, ensure_room, unlink_segment
from staleflow.servers.weights.slots import SLOTS
from staleflow.servers.weights.stores import Store
from staleflow.servers.weights.tensors import CHUNK, Cast, SlotLayout, store_tensor

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
        self._recover()

    def push(self, version: int, tensors: Mapping[str, torch.Tensor]) -> PushResult:
        newest = self.block.published.version
        if version <= newest or version < 0:
            raise WeightsError(
                f"version {version} cannot be pushed after version {newest}: versions only grow; "
                f"push {newest + 1} or later"
            )
        layout = self.layout
        if layout is None:
            layout = SlotLayout.of(tensors, self.cast)
            self._start(layout)
        else:
            layout.check(tensors)
        number = self._choose(layout)
        slot = self._slots[number]
        self.block.begin(number)
        known, slot.digests = slot.digests, None
        with torch.inference_mode():  # whatever the mode was when the slot was made, its tensors can be written in it
            digests, copied = self._fill(layout, slot, tensors, known)
        checksum = layout.checksum(digests)
        header = layout.header(version, checksum, digests)
        slot.memory[: len(header)] = header
        slot.digests = digests
        self.block.finish(number, version)
        self.block.publish(version, number)
        self._shrink()
        return PushResult(version, checksum, copied, layout.data - copied, len(self._slots))

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
        memory = create_segment(self.block.next_generation(number), layout.size)
        self.block.set_size(number, layout.size)
        slot = self._slots[number] = Slot(memory)
        slot.views = layout.views(slot.bytes)

    def _free(self, number: int) -> None:
        self.block.begin(number)
        self.block.set_size(number, 0)
        unlink_segment(self.block.segment(number))
        self._slots.pop(number).unpin()

    def _recover(self) -> None:
        """Continue from what an earlier writer left. What it was writing when it died is rewritten by the next push."""
        published = self.block.published
        for number in self.block.allocated():
            memory = attach_segment(self.block.segment(number))
            if memory is not None:
                self._slots[number] = Slot(memory)
            elif number == published.slot:
                raise WeightsError(
                    f"the memory of version {published.version} of store {self.store.name!r} is gone: start a new store"
                )
        if published.slot < 0:
            for number in list(self._slots):
                self._free(number)
            return
        memory = self._slots[published.slot].memory
        self.layout = SlotLayout.parse(memory[: 8 + int.from_bytes(memory[:8], "little")])
        for number, slot in self._slots.items():
            slot.views = self.layout.views(slot.bytes)
            if not self.block.sequence(number) & 1:
                slot.digests = self.layout.split(slot.memory[self.layout.checksums])
