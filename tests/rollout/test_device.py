"""Where the engine computes: the GPU that was asked for, or one line that says why not."""

import pytest
import torch

from staleflow.rollout import device
from staleflow.rollout.engine import EngineError


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs, and which of them were made the process's own."""
    found = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(device, "wrong_products", lambda _: None)
    return found


def test_kernels_are_launched_on_the_gpu_that_was_asked_for(chosen: list[torch.device]) -> None:
    """With cuda:1 they were launched on the first one, where the tensors are not."""
    assert device.device_of("cuda:1") == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]


def test_a_process_without_a_choice_stays_where_it_is(chosen: list[torch.device]) -> None:
    assert device.device_of("cuda") == torch.device("cuda")
    assert device.device_of("cpu") == torch.device("cpu")
    assert not chosen


def test_a_gpu_that_is_not_there_is_refused_in_one_line(chosen: list[torch.device]) -> None:
    with pytest.raises(EngineError, match=r"device is cuda:2, but there are 2 GPUs here"):
        device.device_of("cuda:2")
    assert not chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_without_any_gpu_it_says_so(name: str) -> None:
    with pytest.raises(EngineError, match=f"device is {name}, but PyTorch finds no GPU here"):
        device.device_of(name)
