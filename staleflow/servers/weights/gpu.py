"""Between a slot and a GPU: pinned memory, and tensors that are converted on the GPU and copied in few large pieces.

pin(memory.data_ptr(), memory.numel())
digests = store_from_gpu(memory, [(entry, tensor), ...])      # neighbours in the slot are one copy
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import torch
import xxhash

from staleflow.servers.weights.tensors import StoredTensor, raw

STAGED = 256 << 20
"""Bytes that are gathered on the GPU for one copy; a larger tensor is a copy of its own."""
HASHERS = min(8, os.cpu_count() or 1)
"""Threads that checksum what has arrived while the rest is being copied."""

Neighbours = list[tuple[int, StoredTensor, torch.Tensor]]


def pin(address: int, size: int) -> bool:
    """Let GPUs copy from and to this memory directly. Where that is refused, copies are only slower."""
    if int(cast(Any, torch.cuda).cudart().cudaHostRegister(address, size, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps the error for the next launch, whatever that is
        torch.zeros(1, device="cuda")
    return False


def unpin(address: int) -> None:
    """Undo ``pin`` before the memory is freed."""
    cast(Any, torch.cuda).cudart().cudaHostUnregister(address)


def store_from_gpu(memory: torch.Tensor, tensors: Sequence[tuple[int, StoredTensor, torch.Tensor]]) -> dict[int, str]:
    """Copy numbered tensors into a slot. Returns their checksums once all are in place."""
    landed = [(run, _send(memory, run)) for run in _runs(tensors)]
    found: list[Future[dict[int, str]]] = []
    with ThreadPoolExecutor(HASHERS) as pool:
        for run, event in landed:
            event.synchronize()
            places = [(number, entry) for number, entry, _ in run]
            found += [pool.submit(digests, memory.data_ptr(), share) for share in shares(places, HASHERS)]
    return {number: digest for each in found for number, digest in each.result().items()}


def shares(places: Sequence[tuple[int, StoredTensor]], count: int) -> list[list[tuple[int, StoredTensor]]]:
    """Tensors shared out over ``count`` threads, about as many bytes for each, in few calls: the interpreter is free
    only while a thread is inside one."""
    found: list[list[tuple[int, StoredTensor]]] = [[] for _ in range(count)]
    held = [0] * count
    for place in sorted(places, key=lambda place: place[1].start - place[1].stop):
        least = held.index(min(held))
        found[least].append(place)
        held[least] += place[1].stop - place[1].start
    return [share for share in found if share]


def digests(address: int, places: Sequence[tuple[int, StoredTensor]]) -> dict[int, str]:
    """Checksums of tensors in a slot at this address, each in one go."""
    return {
        number: xxhash.xxh3_64_hexdigest(raw(address + entry.start, entry.stop - entry.start))
        for number, entry in places
    }


def _send(memory: torch.Tensor, run: Neighbours) -> Any:
    """Convert and gather on the GPU, then copy at once. Returns an event that is recorded after the copy."""
    begin, end = run[0][1].start, run[-1][1].stop
    staged = torch.empty(end - begin, dtype=torch.uint8, device=run[0][2].device)
    parts = [staged[entry.start - begin : entry.stop - begin] for _, entry, _ in run]
    views = [part.view(entry.dtype).view(entry.shape) for part, (_, entry, _) in zip(parts, run, strict=True)]
    cast(Any, torch)._foreach_copy_(views, [tensor.detach() for _, _, tensor in run])
    memory[begin:end].copy_(staged, non_blocking=True)
    return torch.cuda.current_stream(staged.device).record_event()


def _runs(tensors: Sequence[tuple[int, StoredTensor, torch.Tensor]]) -> Iterator[Neighbours]:
    """Neighbours in the slot that are on one device, up to about ``STAGED`` bytes."""
    run: Neighbours = []
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
