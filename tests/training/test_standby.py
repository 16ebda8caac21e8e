"""A trainer that takes a dead one's place is the same trainer, and engines do not notice what it needs for that."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from staleflow.servers.weights import LocalParameterServer, WeightsError, segments, slots
from staleflow.training.standby import revive, standby
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


def push(server: LocalParameterServer, trainer: Trainer) -> None:
    server.push(trainer.version, trainer.weights() | standby(trainer))


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["exact", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_revived_trainer_makes_the_same_updates(base: Any, registry: Path, way: str, cast: Any) -> None:
    options = TrainerOptions(0, learning_rate=1e-2, warmup_steps=3, **WAYS[way])
    straight = Trainer(copy.deepcopy(base), options)
    server = LocalParameterServer.create("run", registry=registry, dtype=cast)
    push(server, straight)
    for _ in range(2):
        train(straight, 1)
        push(server, straight)
    drawn = torch.rand(3)
    train(straight, 2)
    server.detach()

    revived = Trainer(copy.deepcopy(base), options)
    train(revived, 1)
    revived.feed(1, groups_of(1, 2, seed=9, version=1))
    with LocalParameterServer.take_over("run", registry=registry) as server:
        assert revive(revived, server) == revived.version == 2
        assert torch.equal(torch.rand(3), drawn), "the same random numbers follow"
        train(revived, 1)
        push(server, revived)
    train(revived, 1)
    assert all(map(torch.equal, straight.parameters, revived.parameters))
    assert all(map(torch.equal, straight.weights().values(), revived.weights().values()))
    left, found = standby(straight), standby(revived)
    assert [name for name in left if not torch.equal(left[name], found[name])] == []


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


def test_weights_that_engines_get_as_they_are_take_no_further_room(base: Any, registry: Path) -> None:
    trainer = Trainer(copy.deepcopy(base), OPTIONS)
    size = sum(each.nbytes for each in trainer.parameters)
    rest = 4 * len(trainer.parameters) + torch.get_rng_state().nbytes
    for cast, times in ((None, 3), (torch.bfloat16, 3.25)):  # the model is in float64
        with LocalParameterServer.create("run", registry=registry, dtype=cast) as server:
            pushed = server.push(0, trainer.weights() | standby(trainer))
            assert pushed.copied + pushed.skipped == times * size + rest


def test_engines_pull_beside_it_and_tied_embeddings_stay_tied(base: Any, registry: Path) -> None:
    config = copy.deepcopy(base.config)
    config.tie_word_embeddings = True
    first, second, engine = (AutoModelForCausalLM.from_config(config).double() for _ in range(3))
    straight, revived = Trainer(first, OPTIONS), Trainer(second, OPTIONS)
    with LocalParameterServer.create("run", registry=registry) as server:
        train(straight, 2)
        push(server, straight)
        assert server.pull(dict(engine.named_parameters())) == 2
        assert all(map(torch.equal, engine.parameters(), straight.parameters))
        revive(revived, server)
    assert revived.model.lm_head.weight is revived.model.model.embed_tokens.weight
    assert all(map(torch.equal, revived.parameters, straight.parameters))


def test_another_trainer_is_not_revived(base: Any, registry: Path) -> None:
    with LocalParameterServer.create("run", registry=registry) as server:
        trainer = Trainer(copy.deepcopy(base), OPTIONS)
        with pytest.raises(WeightsError, match="the newest is -1"):
            revive(trainer, server)
        push(server, trainer)
        for more in (WAYS["lora"], WAYS["gae"], WAYS["frozen"]):
            with pytest.raises(WeightsError, match="build it from the folder and with the options of the one before"):
                revive(Trainer(copy.deepcopy(base), TrainerOptions(0, **more)), server)
    with LocalParameterServer.create("run", registry=registry) as server:
        server.push(0, trainer.weights())
        with pytest.raises(WeightsError, match="the trainer cannot be revived"):
            revive(trainer, server)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_trainer_on_a_gpu_is_revived(base: Any, registry: Path) -> None:
    straight, revived = (Trainer(copy.deepcopy(base).float().cuda(), OPTIONS) for _ in range(2))
    with LocalParameterServer.create("run", registry=registry, dtype=torch.bfloat16) as server:
        push(server, straight)
        train(straight, 2)
        push(server, straight)
        left = {name: tensor.clone() for name, tensor in standby(straight).items()}
        drawn = torch.rand(3, device="cuda")
        train(revived, 1)
        assert revive(revived, server) == 2
        found = standby(revived)
        assert [name for name in left if not torch.equal(left[name], found[name])] == []
        assert torch.equal(torch.rand(3, device="cuda"), drawn), "the same random numbers follow"
