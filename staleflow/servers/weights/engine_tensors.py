"""The tensors of an engine that weights are pulled into, and what they hold since the last pull.

plan = PullPlan(layout, dict(engine.named_parameters()))
plan.wanted(checksums)      # the tensors that differ from a version with these checksums
plan.landed(checksums)      # they hold it now
"""

from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from staleflow.servers.weights.segments import WeightsError
from staleflow.servers.weights.tensors import DIGEST, SlotLayout, identity, is_plain


class Target(NamedTuple):
    """A tensor of the engine, and the stored one that is copied into it."""

    name: str
    tensor: torch.Tensor
    source: int
    """Number of the stored tensor."""
    address: int
    start: int
    size: int
    plain: bool
    """Whether bytes can be copied as they are; otherwise torch converts, strides or moves them to the device."""


class PullPlan:
    """Which stored tensor goes where, for one set of engine tensors. Keeps their memory alive."""

    def __init__(self, layout: SlotLayout, into: Mapping[str, torch.Tensor]) -> None:
        self._names = list(into)
        self._tensors = list(into.values())
        self._places = [*map(_place, self._tensors)]
        self.targets = _targets(layout, into)
        self.size = sum(target.size for target in self.targets)
        self._sources = np.array([target.source for target in self.targets])
        self._held = np.zeros((len(self.targets), DIGEST // 8), np.uint64)
        """The checksum of what each target holds; zeros if that is not known."""

    def fits(self, into: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the same tensors in the same memory."""
        tensors = list(into.values())
        if list(into) != self._names or [*map(_place, tensors)] != self._places:
            return False
        return all(map(is_, tensors, self._tensors)) or [*map(identity, tensors)] == [*map(identity, self._tensors)]

    def wanted(self, checksums: bytes) -> list[Target]:
        """The targets that do not hold a version with these checksums. What they hold counts as unknown from now on."""
        different = np.flatnonzero((self._held != self._of(checksums)).any(axis=1))
        self._held[different] = 0
        if len(different) == len(self.targets):
            return self.targets
        return [self.targets[number] for number in different.tolist()]

    def landed(self, checksums: bytes) -> None:
        self._held = self._of(checksums)

    def held(self) -> list[str]:
        return [row.tobytes().decode() for row in self._held]

    def _of(self, checksums: bytes) -> Any:
        return np.frombuffer(checksums, np.uint64).reshape(-1, DIGEST // 8)[self._sources]


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """What can change under the same tensor object, by assigning to its ``data``."""
    return tensor.data_ptr(), tensor.stride()


def _targets(layout: SlotLayout, into: Mapping[str, torch.Tensor]) -> list[Target]:
    targets: dict[tuple[Any, ...], Target] = {}
    for name, tensor in into.items():
        index = layout.index.get(name)
        if index is None:
            raise WeightsError(f"the engine's tensor {name!r} is not among the weights: rename it, or leave it out")
        layout.check_tensor(name, tensor, "build the engine and the trainer from the same model")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise WeightsError(f"the engine's tensor {name!r} is expanded, its elements share memory: pass a real one")
        entry = layout.entries[index]
        tensor = tensor.detach()
        plain = is_plain(tensor) and tensor.dtype == entry.dtype
        target = Target(name, tensor, index, tensor.data_ptr(), entry.start, entry.stop - entry.start, plain)
        known = targets.setdefault((*identity(tensor), -1 if target.size else index), target)
        if known.source != index:
            raise WeightsError(
                f"tensors {known.name!r} and {name!r} are one tensor in the engine and two in the weights: tie them in "
                "the trainer, or untie them in the engine"
            )
    for index in set(layout.index.values()) - {target.source for target in targets.values()}:
        raise WeightsError(
            f"tensor {layout.entries[index].name!r} of the weights is missing among the engine's: add it"
        )
    return sorted(targets.values(), key=lambda target: target.start)
