"""Whether a GPU multiplies matrices rightly, looked at once when a process begins to use it.

With some shares of the multiprocessors (``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``) CUDA's library gave wrong products on an
H200, some of them finite: a run would learn from noise and nothing would say so. ::

    problem = wrong_products(torch.device("cuda"))
"""

from collections.abc import Callable

import torch
from torch import Tensor

SHAPES = ((64, 9728, 896), (256, 3072, 576), (300, 192, 64), (512, 896, 896), (1024, 64, 64), (2048, 576, 1536))
"""Rows, columns and what is summed over: sizes at which wrong ones were seen."""
MOST = 0.05
"""Of the difference, relative to the product. Rounding makes 0.003; the wrong ones were off by 0.3 and more."""


def wrong_products(device: torch.device, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> str | None:
    """What is wrong and how to mend it; None if nothing is."""
    chance = torch.Generator().manual_seed(0)
    wrong = 0
    for rows, columns, length in SHAPES:
        left, right = (torch.randn(size, generator=chance).to(device) for size in ((rows, length), (length, columns)))
        expected = left.bfloat16().double() @ right.bfloat16().double()
        found = product(left.bfloat16(), right.bfloat16()).double()
        wrong += not bool((found - expected).norm() <= MOST * expected.norm())
    if not wrong:
        return None
    return (
        f"{wrong} of {len(SHAPES)} matrix products are wrong on {device}: unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, "
        "or stop CUDA's Multi-Process Service"
    )
