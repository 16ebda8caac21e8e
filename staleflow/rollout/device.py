"""Where the built-in engine computes."""

import importlib
from types import ModuleType
from typing import Any

import torch

from staleflow.rollout.engine import EngineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError("device is cuda, but PyTorch finds no GPU here: give cpu, or install PyTorch for CUDA")
    return device


def cuda_part() -> Any:
    """The part that needs Triton, which only builds of PyTorch for CUDA bring along."""
    try:
        module: ModuleType = importlib.import_module("staleflow.rollout.cuda")
    except ModuleNotFoundError as error:
        raise EngineError(f"decoding on a GPU needs {error.name}: install PyTorch for CUDA, which brings it") from None
    return module
