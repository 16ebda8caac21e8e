"""Moments in the host's memory: the same updates to the last bit, the same checkpoints, and any part of a parameter."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.errors import ConfigError
from staleflow.servers.weights.gpu import pin, unpin
from staleflow.training import checkpoints, optimiser
from staleflow.training.optimiser import MEAN, SQUARE, AdamW, HostedAdamW
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.training.batches import quick
from tests.training.test_decoder import model_of
from tests.training.test_trainer import groups_of

HOW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def parameters(shapes: list[tuple[int, ...]], device: str = "cpu") -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random) for shape in shapes]
    made += [torch.randn(3, 2, generator=random).double()]  # as a value head may be, beside a model of float32
    return [torch.nn.Parameter(each.to(device)) for each in made]


def steps(kind: type[AdamW], shapes: list[tuple[int, ...]], count: int, device: str = "cpu") -> Any:
    """Parameters and moments after some steps, in which not every parameter has a gradient."""
    every, random = parameters(shapes, device), torch.Generator().manual_seed(1)
    made = kind([{"params": every[:1]}, {"params": every[1:], "lr": 3e-3}], **HOW)
    made.forget()
    for step in range(count):
        for at, each in enumerate(every):
            gradient = torch.randn(each.shape, generator=random, dtype=each.dtype)
            each.grad = None if (at + step) % 3 == 2 else gradient.to(device)
        made.step()
    held = [made.state[each] for each in every]
    return [*every, *(each[key] for each in held for key in ("step", MEAN, SQUARE))]


@quick(40)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    part=st.sampled_from([16, 32, 64]),  # whole vectors of the CPU's: it rounds what is left over in another way
    count=st.integers(1, 4),
)
def test_updates_by_parts_are_those_of_adamw_to_the_last_bit(
    shapes: list[tuple[int, ...]], part: int, count: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimiser, "PART", part)
        found = steps(HostedAdamW, shapes, count)
    assert all(torch.equal(one, other) for one, other in zip(found, steps(AdamW, shapes, count), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", [100, 1 << 24])
def test_updates_by_parts_on_a_gpu_are_those_of_adamw_to_the_last_bit(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimiser, "PART", part)
    shapes: list[tuple[int, ...]] = [(300, 7), (1,), (64, 64), (5000,)]
    found, expected = (steps(kind, shapes, 5, "cuda") for kind in (HostedAdamW, AdamW))
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True))
    assert {each.device.type for each in found} == {"cuda", "cpu"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moments_that_are_gone_leave_their_memory_to_others() -> None:
    """It stayed pinned: the next moments at the same place ended the trainer with a CUDA error."""
    for _ in range(3):
        steps(HostedAdamW, [(1 << 21,)], 1, "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_cannot_be_pinned_is_only_slower() -> None:
    memory = torch.zeros(1 << 20)
    assert pin(memory.data_ptr(), memory.nbytes)
    assert not pin(memory.data_ptr(), memory.nbytes)
    assert torch.ones(3, device="cuda").sum().item() == 3
    unpin(memory.data_ptr())


def trainers(folder: Path) -> list[Trainer]:
    """One with moments beside its parameters, and one with moments in the host's memory, which here is the same."""
    base = model_of("llama", tied=False).float()
    base.save_pretrained(folder)
    plain, hosted = (Trainer(copy.deepcopy(base), TrainerOptions(0, learning_rate=1e-2)) for _ in range(2))
    hosted.optimiser = HostedAdamW(hosted.optimiser.param_groups, fused=True)
    hosted.optimiser.forget()
    return [plain, hosted]


def train(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        trainer.feed(trainer.version, groups_of(4, 3, seed=trainer.version, version=trainer.version))
        trainer.finish(trainer.version)


def test_a_checkpoint_of_one_kind_is_resumed_by_the_other(tmp_path: Path) -> None:
    plain, hosted = trainers(tmp_path / "model")
    train(plain, 2)
    train(hosted, 2)
    for name, one, other in (("plain", plain, hosted), ("hosted", hosted, plain)):
        checkpoints.save(one, tmp_path / name, base=tmp_path / "model")
        checkpoints.load(other, tmp_path / name)
    train(plain, 1)
    train(hosted, 1)
    assert plain.version == hosted.version == 3
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters, hosted.parameters, strict=True))


def test_moments_are_kept_off_a_gpu_that_is_there_and_has_all_of_them() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        TrainerOptions(0, offload_moments=True)
    with pytest.raises(ConfigError, match="leave one of the two out"):
        TrainerOptions(0, offload_moments=True, device="cuda", ranks=2)
    assert TrainerOptions(0, offload_moments=True, device="cuda").offload_moments
