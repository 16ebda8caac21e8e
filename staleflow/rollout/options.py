"""How the built-in engine is set up, checked before anything is loaded."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

from staleflow.rollout.engine import EngineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    kv_tokens: int = 65_536
    """KV memory in tokens: a hard limit."""
    max_running: int = 64
    page_size: int = 32
    prefill_tokens: int = 512
    """Most prompt tokens that a step computes beside decoding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    kv_on_pull: Literal["recompute", "keep"] = "recompute"
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """Random ones need no checkpoint, only its config.json: for measurements."""
    threads: int | None = None
    """Threads of PyTorch in this process; None leaves them as they are."""

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "max_running", "page_size", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.kv_tokens < self.page_size:
            raise EngineError(f"kv_tokens {self.kv_tokens} is less than one page of {self.page_size} tokens")
        if self.dtype not in DTYPES:
            raise EngineError(f"dtype is {self.dtype!r}: give one of {', '.join(DTYPES)}")
        if self.kv_on_pull not in ("recompute", "keep"):
            raise EngineError(f"kv_on_pull is {self.kv_on_pull!r}: give recompute or keep")


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EngineError(f"device is {name!r}: give cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"device is {name!r}: give cpu or cuda")
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
