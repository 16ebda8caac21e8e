"""Safetensors files that ranks write and read together, each its own rows: the same files as one process would write.

    write(folder / "model.safetensors", trainer.weights(), ranks)     # all ranks call it
    RowFiles([folder / "model.safetensors"], ranks).read(into)        # on any number of ranks

Rows of a tensor are consecutive bytes of the file, so every rank writes at its own places and nobody holds a whole
tensor. Tensors that are not sharded are written by the first rank, and read by all.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from staleflow.servers.weights.tensors import placed
from staleflow.training.ranks import Ranks

ALIGNMENT = 8


def write(path: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """``OSError`` on every rank if any could not write."""
    parts = {name: ranks.part(tensor) for name, tensor in tensors.items()}
    places = placed({name: (part.values.dtype, part.shape) for name, part in parts.items()})
    head = json.dumps({"__metadata__": {"format": "pt"}, **places}).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    data = 8 + len(head)

    def begin() -> None:
        if ranks.leads:
            with path.open("wb") as file:
                file.write(len(head).to_bytes(8, "little") + head)
                file.truncate(data + max((place["data_offsets"][1] for place in places.values()), default=0))

    def fill() -> None:
        with path.open("r+b") as file:
            for name, part in parts.items():
                if part.values.numel():
                    file.seek(data + places[name]["data_offsets"][0] + part.begin * part.values.dtype.itemsize)
                    file.write(part.values.cpu().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    ranks.together(begin)
    ranks.together(fill)


class RowFiles:
    """Tensors in files, of which each rank reads its rows."""

    def __init__(self, paths: Iterable[Path], ranks: Ranks) -> None:
        self._ranks = ranks
        self._paths: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is not a dict
                    self._paths[name] = path
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def rows(self, name: str, like: Tensor) -> Tensor:
        """What this rank holds of a tensor: the same part as of ``like``, which has the same shape."""
        with safe_open(self._paths[name], "pt") as file:
            where = place(like, self._ranks)
            if where is None:
                return file.get_tensor(name)
            return file.get_slice(name)[where] if where.start < where.stop else local(like).cpu().clone()

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy what this rank holds of those that are in the files."""
        for name in into.keys() & self._paths.keys():
            local(into[name]).copy_(self.rows(name, into[name]))


def place(tensor: Tensor, ranks: Ranks) -> slice | None:
    """The rows of a tensor that this rank holds; None: it holds the whole."""
    if not isinstance(tensor, DTensor):
        return None
    begin = ranks.part(tensor).begin // max(1, tensor.shape[1:].numel())
    return slice(begin, begin + tensor.to_local().shape[0])


def local(tensor: Tensor) -> Tensor:
    """The part of it that this process holds: the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
