"""Where Triton's kernels are tested: on a GPU, or by Triton's interpreter on a CPU (``make test-kernels``)."""

import importlib
import os
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def kernels_of(module: str) -> Any:
    """The module; where its kernels cannot run, the tests that ask for it are left out."""
    pytest.importorskip("triton")
    if INTERPRETED and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or make test-kernels", allow_module_level=True)
    return importlib.import_module(module)
