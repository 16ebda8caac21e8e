"""The processes that hold one trainer's model together, as each of them sees it.

    ranks = meet(rank=0, size=2, at=run / "ranks", device="cpu")      # every rank calls it
    ranks.gather({"tokens": 17})                                      # what each gave, in the order of ranks

All ranks call the same things in the same order; one that does not, or has died, ends the wait of the others after
``PATIENCE_S``. On CPUs they talk by gloo over loopback, GPUs by NCCL; nothing is unpickled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from staleflow.errors import line_of
from staleflow.servers.weights.parts import Part

PATIENCE_S = 600.0
"""How long a rank waits for another. In a run the watchdog is sooner; this ends those that nobody watches."""


class Ranks(NamedTuple):
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    group: Any

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def beside(self) -> Ranks:
        """The same ranks for another thread: what waits there does not disturb what waits here."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        return self._replace(group=group)

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave: anything that MessagePack can hold."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.group)
        most = max(int(size) for size in sizes)
        found = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, torch.nn.functional.pad(data, (0, most - data.numel())), group=self.group)
        return [
            msgspec.msgpack.decode(each[: int(size)].numpy().tobytes()) for each, size in zip(found, sizes, strict=True)
        ]

    def sum(self, tensor: Tensor) -> Tensor:
        """Of what every rank gave, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def together(self, do: Callable[[], None]) -> None:
        """Each rank does its part of something on the disk. What goes wrong on one is an error on all."""
        why = ""
        try:
            do()
        except OSError as error:
            why = line_of(error)
        for found in self.gather(why):
            if found:
                raise OSError(found)

    def part(self, tensor: Tensor) -> Part:
        """What this rank holds of a tensor. One that all hold is the first rank's."""
        if not isinstance(tensor, DTensor):
            values = tensor.detach().reshape(-1)
            return Part(values if self.leads else values[:0], 0, tuple(tensor.shape))
        assert tensor.placements == (Shard(0),), f"a tensor is placed as {tensor.placements}"
        local = tensor.to_local().detach()
        row = tensor.shape[1:].numel()
        begin = min(tensor.shape[0], -(-tensor.shape[0] // self.size) * self.rank)
        return Part(local.view(-1), begin * row, tuple(tensor.shape))


def meet(rank: int, size: int, at: Path, device: str) -> Ranks:
    """Join the other ranks. ``at``: a file that is not there yet; with ``cuda``, each rank has the GPU of its number,
    counted from that of ``device``."""
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", (where.index or 0) + rank)
        torch.cuda.set_device(where)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(str(at), size),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    return Ranks(rank, size, where, init_device_mesh(where.type, (size,)), dist.group.WORLD)
