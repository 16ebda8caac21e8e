# pyright: reportMissingImports=false
"""What is different in vLLM's workers on a CPU, where it packs weights for its kernels after loading them.

Packing takes a fifth of a millisecond for each layer, and makes large layers a tenth faster or more. So small models
are unpacked before the first pull: they compute with the weights as they are loaded, and a pull is one copy. Large
ones, and experts, stay packed, and are loaded by vLLM's own reload.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from staleflow.rollout.vllm.places import PLAIN, as_loaded

SMALL = 16 << 20
"""Bytes of the weights of a model that is unpacked."""
Tensors = Iterable[tuple[str, torch.Tensor]]


def unpacked(model: Any) -> bool:
    """Let every layer compute with its weights as they are loaded; False if that is not possible, or does not pay. The
    weights must be loaded next."""
    if not all(as_loaded(module) for module in model.modules()):
        return False
    layers = [each for each in model.modules() if isinstance(getattr(each, "quant_method", None), PLAIN)]
    shapes = {each: get_layerwise_info(each).restore_metadata[0]["weight"] for each in layers}
    if sum(shape.nbytes for shape in shapes.values()) > SMALL:
        return False
    for layer, shape in shapes.items():
        if not layer.weight.numel():
            layer.register_parameter("weight", restore_layer_refs(materialize_meta_tensor(shape), layer))
        layer.cpu_linear = linear
    return True


def forget_experts(model: Any) -> None:
    """Experts are packed when their kernel is made, and new weights would be taken for packed ones."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def with_head(tensors: Tensors, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A packed head that is tied to the embeddings stays old if it is not named."""
    for name, tensor in tensors:
        yield name, tensor
        if getattr(config, "tie_word_embeddings", False) and name.endswith("embed_tokens.weight"):
            yield "lm_head.weight", tensor
