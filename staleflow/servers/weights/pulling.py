"""The reader's side of a weights store: copy the newest version directly into the engine's tensors.

::

    lease the published slot -> sequence even? -> copy what changed -> sequence still the same? -> done
                                    no ^----------------------------------------- no: take the newest, again

The lease asks the writer to leave the slot alone and is renewed during the copy. It is a request, not a lock: a writer
that has no other slot takes it, the reader notices and starts over. So a pull ends with one version in all tensors, or
with an error.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from staleflow.servers.weights.engine_tensors import PullPlan, Target
from staleflow.servers.weights.gpu import pin, unpin
from staleflow.servers.weights.segments import WeightsError, attach_segment
from staleflow.servers.weights.stores import Store
from staleflow.servers.weights.tensors import SlotLayout, digest_of, is_plain, raw

T = TypeVar("T")
ATTEMPTS = 8
"""How often a pull may start over because its slot was taken. With leases that is rare."""
SMALL = 1 << 20
"""Up to this size Python's own copy starts fastest; larger copies let other threads run."""
RENEW = 1 << 30
"""Bytes copied between two renewals of the lease: the C library copies 256 MB at once a quarter faster than in four."""


@dataclass(frozen=True, slots=True)
class PullResult:
    version: int
    checksum: str
    copied: int
    skipped: int
    """Bytes that the engine's tensors already held."""
    attempts: int


class Moves(NamedTuple):
    """What to copy, by how it is copied."""

    small: list[list[tuple[memoryview, memoryview]]]
    large: list[tuple[int, int, int]]
    other: list[tuple[torch.Tensor, torch.Tensor]]


class Mapped:
    """A slot's segment in this process."""

    def __init__(self, generation: int, memory: mmap.mmap) -> None:
        self.generation = generation
        self.memory = memory
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.views: list[torch.Tensor] = []
        self.whole: tuple[PullPlan, Moves] | None = None
        """The moves that copy everything, kept for the next version."""
        self._pinned: bool | None = None

    def pin(self) -> None:
        """Let the GPU copy from it directly."""
        if self._pinned is None:
            self._pinned = pin(self.address, len(self.memory))

    def drop(self) -> None:
        """Forget the tensors; the memory is unmapped when the last one over it is gone."""
        if self._pinned:
            unpin(self.address)
        self.views, self.whole = [], None


class Reader:
    """Pulls versions from a store; to be used by one thread at a time."""

    def __init__(self, store: Store, lease_s: float, between: Callable[[], None] | None = None) -> None:
        self.store = store
        self.block = store.block
        self.lease_s = lease_s
        self.last: PullResult | None = None
        self._between = between
        self._layout: SlotLayout | None = None
        self._plan: PullPlan | None = None
        self._mapped: dict[int, Mapped] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        with store.registry.locked():
            self._entry = self.block.claim()

    def pull(self, into: Mapping[str, torch.Tensor], at_least: int, verify: bool) -> PullResult:
        attempts, version, done = self._repeat(
            at_least, lambda version, slot: self._attempt(version, slot, into, verify)
        )
        checksum, copied, skipped = done
        self.last = PullResult(version, checksum, copied, skipped, attempts)
        return self.last

    def lend(self, use: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None], at_least: int) -> int:
        """Let the tensors be read where they are, again if they were overwritten meanwhile."""

        def attempt(version: int, slot: int) -> bool | None:
            opened = self._open(version, slot)
            if opened is None:
                return None
            mapped, layout, sequence = opened
            if torch.cuda.is_initialized():
                mapped.pin()
            use(version, self._lent(mapped, layout, slot, sequence))
            return True if self.block.sequence(slot) == sequence else None

        return self._repeat(at_least, attempt)[1]

    def lend_slot(self, use: Callable[[int, memoryview, int, Callable[[], bool]], None], at_least: int) -> int:
        """The same with the slot as it is: its bytes, how many of them are the header, and what to call now and then
        to keep it. That returns False once it was overwritten."""

        def attempt(version: int, slot: int) -> bool | None:
            opened = self._open(version, slot)
            if opened is None:
                return None
            mapped, layout, sequence = opened
            memory, header = memoryview(mapped.memory)[: layout.size], layout.size - layout.data
            use(version, memory, header, lambda: self._keep(slot, sequence))
            return True

        return self._repeat(at_least, attempt)[1]

    def _lent(self, mapped: Mapped, layout: SlotLayout, slot: int, sequence: int) -> Iterator[tuple[str, torch.Tensor]]:
        for entry, view in zip(layout.entries, mapped.views, strict=True):
            self._keep(slot, sequence)
            yield entry.name, view

    def _repeat(self, at_least: int, attempt: Callable[[int, int], T | None]) -> tuple[int, int, T]:
        """Try it with the newest version and its slot, leased, until the slot was not taken meanwhile."""
        for number in range(1, ATTEMPTS + 1):
            version, slot = self.block.published
            if version < max(0, at_least):
                raise WeightsError(
                    f"version {max(0, at_least)} is not published, the newest is {version}: pull after it was pushed"
                )
            self.block.lease(self._entry, slot, self.lease_s)
            try:
                done = attempt(version, slot)
            finally:
                self.block.release(self._entry)
            if done is not None:
                return number, version, done
        raise WeightsError(
            f"version {self.block.published.version} and those before it were overwritten {ATTEMPTS} times while they "
            "were pulled, and the tensors mix versions now: pull again before using them, push less often, or allow "
            "more slots (max_slots)"
        )

    def whole(self) -> bool:
        """Whether the published slot has the checksums of its header. For a store whose writer is dead."""
        version, slot = self.block.published
        mapped = self._map(slot) if version >= 0 and self.block.version(slot) == version else None
        if mapped is None or self.block.sequence(slot) & 1:
            return False
        try:
            layout = SlotLayout.parse(mapped.memory[: 8 + int.from_bytes(mapped.memory[:8], "little")])
            views, digests = layout.views(mapped.tensor), layout.split(mapped.memory[layout.checksums])
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError, AttributeError):
            return False
        return all(
            digest_of(view.data_ptr(), view.nbytes) == digest for view, digest in zip(views, digests, strict=True)
        )

    def forget(self) -> None:
        self._plan = None
        for mapped in self._mapped.values():
            mapped.whole = None

    def close(self) -> None:
        self.block.disclaim(self._entry)
        for mapped in self._mapped.values():
            mapped.drop()
        self._mapped.clear()
        self._plan = None

    # One attempt. None: the slot was taken.

    def _attempt(
        self, version: int, slot: int, into: Mapping[str, torch.Tensor], verify: bool
    ) -> tuple[str, int, int] | None:
        opened = self._open(version, slot)
        if opened is None:
            return None
        mapped, layout, sequence = opened
        checksums = mapped.memory[layout.checksums]
        checksum = mapped.memory[layout.checksum_at].decode()
        if self.block.sequence(slot) != sequence:
            return None
        if self._plan is None or not self._plan.fits(into):
            self._plan = PullPlan(layout, into)
        plan = self._plan
        wanted = plan.wanted(checksums)
        if wanted and not self._copy(self._moves(plan, mapped, wanted), mapped, slot, sequence):
            return None
        if self.block.sequence(slot) != sequence:
            return None
        plan.landed(checksums)
        if verify and not self._verify(plan, mapped, slot, sequence):
            return None
        copied = sum([target.size for target in wanted]) if len(wanted) < len(plan.targets) else plan.size
        return checksum, copied, plan.size - copied

    def _open(self, version: int, slot: int) -> tuple[Mapped, SlotLayout, int] | None:
        sequence = self.block.sequence(slot)
        if sequence & 1 or self.block.version(slot) != version:
            return None
        mapped = self._map(slot)
        if mapped is None:
            return None
        layout = self._layout or self._read_layout(mapped, slot, sequence)
        if layout is None:
            return None
        if not mapped.views:
            mapped.views = layout.views(mapped.tensor)
        return mapped, layout, sequence

    def _map(self, slot: int) -> Mapped | None:
        """The slot's segment; drops segments that the writer has freed."""
        for number, mapped in list(self._mapped.items()):
            if mapped.generation != self.block.generation(number) or not self.block.size(number):
                self._mapped.pop(number).drop()
        if slot not in self._mapped:
            generation = self.block.generation(slot)
            memory = attach_segment(self.block.segment(slot))
            if memory is None or generation != self.block.generation(slot):
                return None
            self._mapped[slot] = Mapped(generation, memory)
        return self._mapped[slot]

    def _read_layout(self, mapped: Mapped, slot: int, sequence: int) -> SlotLayout | None:
        length = 8 + int.from_bytes(mapped.memory[:8], "little")
        header = mapped.memory[:length]
        if self.block.sequence(slot) != sequence:
            return None
        self._layout = SlotLayout.parse(header)
        return self._layout

    # Copying

    def _moves(self, plan: PullPlan, mapped: Mapped, wanted: list[Target]) -> Moves:
        if len(wanted) < len(plan.targets):
            return moves(wanted, mapped)
        if mapped.whole is None or mapped.whole[0] is not plan:
            mapped.whole = plan, moves(wanted, mapped)
        return mapped.whole[1]

    def _copy(self, moves: Moves, mapped: Mapped, slot: int, sequence: int) -> bool:
        """Copy, renewing the lease. False if the slot was taken meanwhile: then the rest is not worth copying."""
        between = self._between
        for batch in moves.small:
            if not self._keep(slot, sequence):
                return False
            for target, source in batch:
                target[:] = source
                if between is not None:
                    between()
        for target, source, size in moves.large:
            for at in range(0, size, RENEW):
                if not self._keep(slot, sequence):
                    return False
                ctypes.memmove(target + at, source + at, min(RENEW, size - at))
                if between is not None:
                    between()
        return not moves.other or self._copy_by_torch(moves.other, mapped, slot, sequence)

    def _copy_by_torch(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], mapped: Mapped, slot: int, sequence: int
    ) -> bool:
        """Copy what is strided, converted, or on a device. GPUs copy in parallel with decoding; the copies have ended
        when this returns, so that the sequence is read after the last byte."""
        taken, streams = False, dict[torch.device, torch.cuda.Stream]()
        with torch.inference_mode():
            for target, source in pairs:
                taken = not self._keep(slot, sequence)
                if taken:
                    break
                if target.is_cuda:
                    mapped.pin()
                    if target.device not in streams:
                        streams[target.device] = self._stream(target.device)
                    with torch.cuda.stream(streams[target.device]):
                        target.copy_(source, non_blocking=True)
                else:
                    target.copy_(source)
                if self._between is not None:
                    self._between()
        for stream in streams.values():
            stream.synchronize()
        return not taken

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """A stream for copies, after what the engine has launched so far. To be asked for once in a pull: each time the
        copies wait until the engine's kernels have had their turn on a GPU that others use, too."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]

    def _keep(self, slot: int, sequence: int) -> bool:
        self.block.lease(self._entry, slot, self.lease_s)
        return self.block.sequence(slot) == sequence

    def _verify(self, plan: PullPlan, mapped: Mapped, slot: int, sequence: int) -> bool:
        """Compare the checksums of the engine's tensors. False if the slot was taken, so that they cannot be known."""
        for target, held in zip(plan.targets, plan.held(), strict=True):
            tensor, view = target.tensor, mapped.views[target.source]
            if tensor.dtype != view.dtype:
                landed = view  # converted on the way: the checksum is that of the source
            elif is_plain(tensor):
                landed = tensor
            else:
                landed = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).resolve_neg()
            if digest_of(landed.data_ptr(), target.size) == held:
                continue
            if landed is view and self.block.sequence(slot) != sequence:
                return False
            self.forget()
            raise WeightsError(
                f"tensor {target.name!r} does not have the checksum it was pushed with: something else writes to it "
                "(call forget() after that) or memory is damaged; pull again"
            )
        return True


def moves(targets: list[Target], mapped: Mapped) -> Moves:
    """How to copy these. Neighbours in both the slot and the engine are copied as one."""
    runs: list[list[int]] = []
    other: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target in targets:
        if not target.plain:
            other.append((target.tensor, mapped.views[target.source]))
        elif target.size:
            if runs and runs[-1][0] + runs[-1][2] == target.address and runs[-1][1] + runs[-1][2] == target.start:
                runs[-1][2] += target.size
            else:
                runs.append([target.address, target.start, target.size])
    large = [(address, mapped.address + start, size) for address, start, size in runs if size > SMALL]
    small: list[list[tuple[memoryview, memoryview]]] = []
    room = 0
    source = memoryview(mapped.memory)
    for address, start, size in runs:
        if size <= SMALL:
            if room < size:
                small.append([])
                room = RENEW
            room -= size
            small[-1].append((memoryview(raw(address, size)).cast("B"), source[start : start + size]))
    return Moves(small, large, other)
