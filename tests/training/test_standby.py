"""A trainer that takes a dead one's place is the same trainer, and engines do not notice what it needs for that."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from staleflow.servers.weights import WeightsError, segments, slots
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.training.standby import MOST_BEHIND, Standby, state
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.training.test_checkpoints import OPTIONS, WAYS, train
from tests.training.test_trainer import base, groups_of

__all__ = ["base"]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.glob("*.weights"):
        for name in slots.segments_of(path.read_bytes()) or []:
            segments.unlink_segment(name)


def kept(registry: Path, again: bool = False) -> Standby:
    server = LocalParameterServer.take_over if again else LocalParameterServer.create
    return Standby(server("run", registry=registry), registry, share=1.0)  # every version


def keep(standby: Standby, trainer: Trainer) -> None:
    standby.keep(trainer)
    standby.wait()


@pytest.mark.parametrize("way", WAYS)
def test_a_revived_trainer_makes_the_same_updates(base: Any, registry: Path, way: str) -> None:
    options = TrainerOptions(0, learning_rate=1e-2, warmup_steps=3, **WAYS[way])
    straight = Trainer(copy.deepcopy(base), options)
    standby = kept(registry)
    keep(standby, straight)
    for _ in range(2):
        train(straight, 1)
        keep(standby, straight)
    drawn = torch.rand(3)
    train(straight, 2)
    standby.detach()

    revived = Trainer(copy.deepcopy(base), options)
    train(revived, 1)
    revived.feed(1, groups_of(1, 2, seed=9, version=1))
    standby = kept(registry, again=True)
    assert standby.revive(revived) == revived.version == 2
    assert torch.equal(torch.rand(3), drawn), "the same random numbers follow"
    train(revived, 1)
    keep(standby, revived)
    train(revived, 1)
    assert all(map(torch.equal, straight.parameters, revived.parameters))
    assert all(map(torch.equal, straight.weights().values(), revived.weights().values()))
    left, found = state(straight), state(revived)
    assert [name for name in left if not torch.equal(left[name], found[name])] == []
    standby.close()


def test_an_error_of_the_copy_beside_the_next_step_is_not_lost(base: Any, registry: Path) -> None:
    standby, trainer = kept(registry), Trainer(copy.deepcopy(base), OPTIONS)
    keep(standby, trainer)
    standby.keep(trainer)  # the same version again
    with pytest.raises(WeightsError, match="versions only grow"):
        standby.wait()
    standby.close()


def test_what_was_fed_is_found_again_until_the_version_it_made_is_kept(base: Any, registry: Path) -> None:
    standby, trainer = kept(registry), Trainer(copy.deepcopy(base), OPTIONS)
    for step in range(3):
        standby.note(step, [[step, 2], [3]])
    trainer.version = 2
    keep(standby, trainer)
    assert standby.noted(2, list[list[int]]) == [[2, 2], [3]]
    with pytest.raises(WeightsError, match=r"fed-0*1.msgpack is missing: resume from a checkpoint"):
        standby.noted(1, list[list[int]])
    standby.close()
    assert not list(registry.glob("*.msgpack"))


def test_a_version_whose_report_cannot_be_written_is_not_kept(base: Any, registry: Path) -> None:
    """The disk is full: a successor makes the step again, and reports it."""
    standby, trainer = kept(registry), Trainer(copy.deepcopy(base), OPTIONS)
    assert standby.told(list[int]) is None
    keep(standby, trainer)
    (draft := registry / "told.draft").mkdir()
    trainer.version = 1
    standby.keep(trainer, [1])
    standby.wait()
    assert standby.newest() == 0
    draft.rmdir()
    trainer.version = 2
    standby.keep(trainer, [2])
    standby.wait()
    assert standby.newest() == 2
    assert standby.told(list[int]) == [2]
    standby.close()
    assert not list(registry.glob("told*"))


def test_short_steps_do_not_wait_for_a_copy_each_and_never_fall_far_behind(base: Any, registry: Path) -> None:
    server = LocalParameterServer.create("run", registry=registry)
    standby, trainer = Standby(server, registry, share=1e-9), Trainer(copy.deepcopy(base), OPTIONS)
    found: list[int] = []
    for trainer.version in range(2 * MOST_BEHIND + 2):
        keep(standby, trainer)
        found.append(standby.newest())
    assert sorted(set(found)) == [0, MOST_BEHIND, 2 * MOST_BEHIND]
    assert all(version - kept < MOST_BEHIND for version, kept in enumerate(found))
    standby.close()


@pytest.mark.parametrize("way", WAYS)
def test_moments_made_before_the_first_update_change_no_bit_of_it(base: Any, way: str) -> None:
    options = TrainerOptions(0, learning_rate=1e-2, weight_decay=0.1, **WAYS[way])
    for model in (copy.deepcopy(base), copy.deepcopy(base).float()):
        early, late = (Trainer(copy.deepcopy(model), options) for _ in range(2))
        late.optimiser.state.clear()
        for _ in range(3):
            train(early, 1)
            train(late, 1)
            assert all(map(torch.equal, early.parameters, late.parameters))
            assert early.optimiser.state_dict()["param_groups"] == late.optimiser.state_dict()["param_groups"]
        for parameter, lazy in zip(early.parameters, late.parameters, strict=True):
            made, grown = early.optimiser.state[parameter], late.optimiser.state[lazy]
            assert [*made] == [*grown]
            for one, other in zip(made.values(), grown.values(), strict=True):
                assert (one.dtype, one.device, one.stride()) == (other.dtype, other.device, other.stride())
                assert torch.equal(one, other)


def test_parameters_without_a_gradient_keep_their_zeros(base: Any) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    trainer.model.model.norm.weight.requires_grad_(False)
    train(trainer, 2)
    state = trainer.optimiser.state[trainer.model.model.norm.weight]
    assert not any(each.any() for each in state.values())


def test_tied_embeddings_stay_tied(base: Any, registry: Path) -> None:
    config = copy.deepcopy(base.config)
    config.tie_word_embeddings = True
    straight, revived = (Trainer(AutoModelForCausalLM.from_config(config).double(), OPTIONS) for _ in range(2))
    standby = kept(registry)
    train(straight, 2)
    keep(standby, straight)
    standby.revive(revived)
    assert revived.model.lm_head.weight is revived.model.model.embed_tokens.weight
    assert all(map(torch.equal, revived.parameters, straight.parameters))
    standby.close()


def test_another_trainer_is_not_revived(base: Any, registry: Path) -> None:
    standby, trainer = kept(registry), Trainer(copy.deepcopy(base), OPTIONS)
    with pytest.raises(WeightsError, match="the newest is -1"):
        standby.revive(trainer)
    keep(standby, trainer)
    for more in (WAYS["lora"], WAYS["gae"], WAYS["frozen"]):
        with pytest.raises(WeightsError, match="build it from the folder and with the options of the one before"):
            standby.revive(Trainer(copy.deepcopy(base), TrainerOptions(0, **more)))
    standby.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_trainer_on_a_gpu_is_revived(base: Any, registry: Path) -> None:
    config = copy.deepcopy(base.config)
    config.num_attention_heads, config.head_dim = 2, 8
    model = AutoModelForCausalLM.from_config(config).float().cuda()
    straight, revived = (Trainer(copy.deepcopy(model), OPTIONS) for _ in range(2))
    standby = kept(registry)
    keep(standby, straight)
    train(straight, 2)
    left = {name: tensor.clone() for name, tensor in state(straight).items()}
    standby.keep(straight)
    straight.feed(2, groups_of(2, 3, version=2))  # beside the copy
    standby.wait()
    train(revived, 1)
    assert standby.revive(revived) == 2
    found = state(revived)
    assert [name for name in left if not torch.equal(left[name], found[name])] == []
    standby.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_what_is_pushed_from_a_gpu_is_what_is_pushed_from_a_cpu(registry: Path, dtype: Any) -> None:
    tensors = {f"w{at}": torch.randn(at + 1, 700) for at in range(40)} | {"steps": torch.arange(5)}
    there = {name: tensor.cuda() for name, tensor in tensors.items()} | {"steps": tensors["steps"]}
    with LocalParameterServer.create("w", registry=registry, dtype=dtype) as server:
        given = (tensors, there, tensors, there)
        assert len({server.push(version, each).checksum for version, each in enumerate(given)}) == 1
        into = {name: torch.empty_like(tensor) for name, tensor in there.items()}
        assert server.pull(into, verify=True) == 3
        wanted = {name: each.to(dtype or each.dtype).to(each.dtype) for name, each in there.items() if name != "steps"}
        assert all(torch.equal(into[name], each) for name, each in wanted.items())
