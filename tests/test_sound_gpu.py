"""A GPU that multiplies wrongly is noticed before anything is learned from it."""

import pytest
import torch
from torch import Tensor

from staleflow.sound_gpu import wrong_products

DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_right_products_are_accepted(device: torch.device) -> None:
    assert wrong_products(device) is None


@pytest.mark.parametrize("value", [0.0, float("nan"), 1e19])
def test_a_product_with_some_wrong_rows_is_named_with_the_remedy(value: float) -> None:
    def spoilt(left: Tensor, right: Tensor) -> Tensor:
        found = left @ right
        if found.shape == (512, 896):
            found[:64] = value
        return found

    problem = wrong_products(torch.device("cpu"), spoilt)
    assert problem is not None
    assert problem.startswith("1 of 6 matrix products are wrong")
    assert "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in problem
