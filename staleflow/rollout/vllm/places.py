# pyright: reportMissingImports=false
"""Where vLLM's loaders put each tensor of a checkpoint in the model of a worker, found by watching them.

vLLM's own way to load weights again (``reload``) makes every layer anew beside the one in use, for formats that are
packed or quantised after loading. Where a model computes with what is loaded as it is loaded, one copy does::

    found = places(model, tensors)          # None: something is packed, so vLLM must load it
    found["model.layers.0.self_attn.q_proj.weight"]     # a part of qkv_proj.weight

The loaders run once more over weights that are there already, and nothing is written: each copy that they would make is
compared with what is in its place. If all is equal, and every parameter has got something, the places are right.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods of layers that leave weights as they are loaded, except on a CPU."""


class Place(NamedTuple):
    """A part of a parameter, and the part of the checkpoint's tensor that belongs there."""

    into: torch.Tensor
    stride: tuple[int, ...]
    offset: int
    """Of its first element in the tensor."""

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.into.shape, self.stride, tensor.storage_offset() + self.offset)


Places = Mapping[str, list[Place]]


class _UnknownError(Exception):
    """A loader copies something else than a part of a tensor that it was given."""


class _Watch(TorchDispatchMode):
    """Records copies instead of making them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.found: dict[str, list[Place]] = {}
        self._tensors = tensors
        self._starts = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        into, value = args[0], args[1]
        at = bisect_right(self._starts, (value.data_ptr(), chr(0x10FFFF))) - 1
        name = self._starts[at][1] if at >= 0 else None
        tensor = None if name is None else self._tensors[name]
        if tensor is None or name is None or value.device != tensor.device or value.shape != into.shape:
            raise _UnknownError
        begin = value.data_ptr() - tensor.data_ptr()
        if begin >= max(1, tensor.nbytes) or value.dtype != tensor.dtype:
            raise _UnknownError
        self.found.setdefault(name, []).append(Place(into, value.stride(), begin // tensor.element_size()))
        return into


@torch.no_grad()
def places(model: Any, tensors: Mapping[str, torch.Tensor]) -> Places | None:
    """``tensors``: what ``model`` has just loaded."""
    if not all(as_loaded(module) for module in model.modules()):
        return None
    watch = _Watch(tensors)
    try:
        with watch:
            model.load_weights(iter(tensors.items()))
    except _UnknownError:
        return None
    given = {place.into.untyped_storage().data_ptr() for place in _all(watch.found)}
    if watch.found.keys() != tensors.keys() or any(
        parameter.untyped_storage().data_ptr() not in given for parameter in model.parameters()
    ):
        return None
    for name, found in watch.found.items():
        for place in found:
            if not torch.equal(place.into.cpu(), place.part_of(tensors[name]).to(place.into.dtype).cpu()):
                return None
    return watch.found


def _all(found: Places) -> Iterable[Place]:
    return (place for each in found.values() for place in each)


def as_loaded(module: Any) -> bool:
    """Whether the layer keeps nothing that was made of its weights: no packed method, no tensor beside them."""
    method = getattr(module, "quant_method", None)
    if method is not None and not isinstance(method, PLAIN):
        return False
    if hasattr(module, "kv_cache"):
        return type(module).__name__ == "Attention"  # MLA keeps products of its weights
    return not any(isinstance(value, torch.Tensor) for value in vars(module).values())


def whole(found: Places, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """By the name of each tensor its place; None if some are loaded in parts, as by tensor-parallel workers."""
    single = {name: each[0].into for name, each in found.items() if len(each) == 1}
    if single.keys() == tensors.keys() and all(single[name].shape == tensors[name].shape for name in tensors):
        return single
    return None
