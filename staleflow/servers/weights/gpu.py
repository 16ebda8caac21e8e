"""Between a slot and a GPU: pinned memory, and tensors that are converted on the GPU and come in few large copies.

pin(memory.data_ptr(), memory.numel())
digests = store_from_gpu(memory, [(entry, tensor), ...])      # neighbours in the slot are one copy
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
import xxhash

from staleflow.servers.weights.tensors import Entry, raw

STAGED = 256 << 20
"""Bytes that are gathered on the GPU for one copy; a larger tensor is one alone."""
HASHERS = min(8, os.cpu_count() or 1)
"""Threads that checksum what has landed, while the rest is under way."""

Run = list[tuple[int, Entry, torch.Tensor]]


def pin(address: int, size: int) -> bool:
    """Let GPUs copy from and to this memory directly. Where that is refused, copies are only slower."""
    return int(cast(Any, torch.cuda).cudart().cudaHostRegister(address, size, 0)) == 0


def unpin(address: int) -> None:
    """Before the memory is given back."""
    cast(Any, torch.cuda).cudart().cudaHostUnregister(address)


def store_from_gpu(memory: torch.Tensor, tensors: Sequence[tuple[int, Entry, torch.Tensor]]) -> dict[int, str]:
    """Bring the bytes of a slot to the values of numbered tensors. Returns their checksums once all are in place."""
    landed = [(run, _send(memory, run)) for run in _runs(tensors)]
    found: list[Future[dict[int, str]]] = []
    with ThreadPoolExecutor(HASHERS) as pool:
        for run, event in landed:
            event.synchronize()
            places = [(number, entry) for number, entry, _ in run]
            found += [pool.submit(digests, memory.data_ptr(), share) for share in shares(places, HASHERS)]
    return {number: digest for each in found for number, digest in each.result().items()}


def shares(places: Sequence[tuple[int, Entry]], count: int) -> list[list[tuple[int, Entry]]]:
    """About as many bytes for each of so many, in few calls: a thread that hashes lets others run, between two it
    does not."""
    found: list[list[tuple[int, Entry]]] = [[] for _ in range(count)]
    held = [0] * count
    for place in sorted(places, key=lambda place: place[1].start - place[1].stop):
        least = held.index(min(held))
        found[least].append(place)
        held[least] += place[1].stop - place[1].start
    return [share for share in found if share]


def digests(address: int, places: Sequence[tuple[int, Entry]]) -> dict[int, str]:
    """Checksums of tensors in a slot at this address, each in one go."""
    return {
        number: xxhash.xxh3_64_hexdigest(raw(address + entry.start, entry.stop - entry.start))
        for number, entry in places
    }


def _send(memory: torch.Tensor, run: Run) -> Any:
    """Convert and gather on the GPU, then one copy. Returns an event that is behind it."""
    begin, end = run[0][1].start, run[-1][1].stop
    staged = torch.empty(end - begin, dtype=torch.uint8, device=run[0][2].device)
    parts = [staged[entry.start - begin : entry.stop - begin] for _, entry, _ in run]
    views = [part.view(entry.dtype).view(entry.shape) for part, (_, entry, _) in zip(parts, run, strict=True)]
    cast(Any, torch)._foreach_copy_(views, [tensor.detach() for _, _, tensor in run])
    memory[begin:end].copy_(staged, non_blocking=True)
    return torch.cuda.current_stream(staged.device).record_event()


def _runs(tensors: Sequence[tuple[int, Entry, torch.Tensor]]) -> Iterator[Run]:
    """Neighbours in the slot and on one device, of about as many bytes as are staged at once."""
    run: Run = []
    for each in tensors:
        _, entry, tensor = each
        if run and (
            run[-1][1].stop != entry.start or run[0][2].device != tensor.device or entry.stop - run[0][1].start > STAGED
        ):
            yield run
            run = []
        run.append(each)
    if run:
        yield run
