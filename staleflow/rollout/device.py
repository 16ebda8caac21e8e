"""Where the built-in engine computes."""

import importlib
from types import ModuleType
from typing import Any

import torch

from staleflow.rollout.engine import EngineError
from staleflow.sound_gpu import wrong_products

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(name: str) -> torch.device:
    """Checked. A GPU becomes the one of this process: launches of our kernels do not ask where their tensors are."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise EngineError(f"device is {name}, but PyTorch finds no GPU here: give cpu, or install PyTorch for CUDA")
    if device.index is not None:
        if device.index >= (count := torch.cuda.device_count()):
            raise EngineError(
                f"device is {name}, but there are {count} GPUs here, counted from cuda:0: give one of them"
            )
        torch.cuda.set_device(device)
    if (problem := wrong_products(device)) is not None:
        raise EngineError(problem)
    return device


def cuda_parts() -> tuple[Any, Any]:
    """What decodes and what prefills on a GPU: both need Triton, which only builds of PyTorch for CUDA bring along."""
    try:
        decoding: ModuleType = importlib.import_module("staleflow.rollout.cuda")
        prefilling: ModuleType = importlib.import_module("staleflow.rollout.cuda_prefill")
    except ModuleNotFoundError as error:
        raise EngineError(f"decoding on a GPU needs {error.name}: install PyTorch for CUDA, which brings it") from None
    return decoding.DecodeGraphs, prefilling.PrefillSteps
