"""Several processes write one version together: each copies the part of every tensor that it holds.

    pushes = SharedPush(gather, rank=0, size=2, writer)      # in the process that created the store
    pushes = SharedPush(gather, rank=1, size=2)              # in the other
    pushes.push(7, {"w": Part(values, begin=128, shape=(16, 16))})          # all call it

A part is consecutive elements of a tensor, and so consecutive bytes of a slot: nobody ever holds a whole tensor. When
all have copied, each takes the checksums of some tensors from the slot itself, and the writer publishes the version as
always. ``gather`` gives every process what each has given, and so returns when all have called it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from staleflow.servers.weights.gpu import digests, pin, shares, unpin
from staleflow.servers.weights.pushing import PushResult, Writer
from staleflow.servers.weights.segments import WeightsError, attach_segment
from staleflow.servers.weights.tensors import DTYPES, NAMES, Cast, SlotLayout, StoredTensor, stored_dtype


class Part(NamedTuple):
    values: torch.Tensor
    """Flat."""
    begin: int
    """Which element of the whole tensor is the first of them."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def where(self) -> slice:
        return slice(self.begin, self.begin + self.values.numel())


def layout_of(parts: Mapping[str, Part], cast: Cast) -> SlotLayout:
    return SlotLayout.planned(
        {name: (stored_dtype(name, part.values, cast), part.shape) for name, part in parts.items()}, {}
    )


class Segment:
    """A slot in a process that is not its writer."""

    def __init__(self, name: str) -> None:
        memory = attach_segment(name)
        if memory is None:
            raise WeightsError(f"the memory {name} of the weights is gone: has the writer died?")
        self.name = name
        self.memory: mmap.mmap = memory
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned = False

    def pin(self) -> None:
        self._pinned = self._pinned or pin(self.bytes.data_ptr(), len(self.memory))

    def close(self) -> None:
        if self._pinned:
            unpin(self.bytes.data_ptr())


class SharedPush:
    """One process's end of the pushes to a store. ``writer``: in the first process only."""

    def __init__(self, gather: Callable[[Any], list[Any]], rank: int, size: int, writer: Writer | None = None) -> None:
        self._gather = gather
        self._rank = rank
        self._size = size
        self._writer = writer
        self._segments: dict[int, Segment] = {}

    def push(self, version: int, parts: Mapping[str, Part]) -> PushResult | None:
        """Nothing is published before all have written everything."""
        number, order = -1, None
        if self._writer is not None:
            self._writer.prepare(version, partial(layout_of, parts))
            layout, number = self._writer.begin()
            places = [(entry.name, NAMES[entry.dtype], entry.start, entry.stop) for entry in layout.entries]
            order = (number, self._writer.block.segment(number), places)
        number, name, places = self._gather(order)[0]
        entries = [StoredTensor(name, DTYPES[kind], (), start, stop) for name, kind, start, stop in places]
        segment = self._segment(number, name)
        with torch.inference_mode():
            for entry in entries:
                self._copy(segment, entry, parts[entry.name])
        self._gather(None)  # until all have copied
        mine = [*shares([*enumerate(entries)], self._size), *([] for _ in range(self._size))][self._rank]
        found: dict[int, str] = {}
        for each in self._gather(digests(segment.bytes.data_ptr(), mine)):
            found |= each
        if self._writer is None:
            return None
        copied = sum(entry.stop - entry.start for entry in entries)
        return self._writer.publish(version, number, [found[at] for at in range(len(entries))], copied)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _segment(self, number: int, name: str) -> Segment:
        held = self._segments.get(number)
        if held is None or held.name != name:
            if held is not None:
                held.close()
            held = self._segments[number] = Segment(name)
        return held

    def _copy(self, segment: Segment, entry: StoredTensor, part: Part) -> None:
        if part.values.numel():
            if part.values.is_cuda:
                segment.pin()
            segment.bytes[entry.start : entry.stop].view(entry.dtype)[part.where].copy_(part.values)
