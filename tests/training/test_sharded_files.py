"""What ranks write together is what one process would have written: checkpoints, versions, a successor's state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from staleflow.servers.weights import WeightsError
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.training.checkpoints import load, save
from staleflow.training.checksums import damage
from staleflow.training.standby import Standby, state
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.training.rank_processes import RankProcesses, closed, continued, failing, fed, model_of, pushed, revived
from tests.training.test_trainer import groups_of

pytestmark = pytest.mark.processes

STEPS = [groups_of(4, 3, seed, version=seed) for seed in range(4)]
KINDS: list[dict[str, Any]] = [{}, {"lora_rank": 2}, {"advantage": "gae", "kl_coefficient": 0.1}]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(3, tmp_path_factory.mktemp("three")) as ranks:
        yield ranks


def alone(options: TrainerOptions, steps: list[Any], load_from: Path | None = None) -> Trainer:
    trainer = Trainer(model_of(kind=torch.float32), options)
    if load_from is not None:
        load(trainer, load_from)
    for groups in steps:
        fed(trainer, groups, [len(groups)])
    return trainer


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], apart: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape
        assert torch.allclose(tensor.double(), other[name].double(), rtol=0, atol=apart), name


@pytest.mark.parametrize("more", KINDS, ids=lambda more: "-".join(more) or "plain")
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    two: RankProcesses, three: RankProcesses, tmp_path: Path, more: Any
) -> None:
    options = TrainerOptions(0, learning_rate=1e-3, **more)
    whole = state(alone(options, STEPS))
    by_two, by_one, by_three = (tmp_path / name for name in ("two", "one", "three"))

    made = two.call(continued, options, STEPS[:1], None, by_two)
    assert damage(by_two) == ""
    again = alone(options, [], by_two)
    assert again.version == 1
    assert_same(made[0], state(again), 0.0)

    fed(again, STEPS[1], [4])
    save(again, by_one)
    three.call(continued, options, STEPS[2:3], by_one, by_three)
    for found in two.call(continued, options, STEPS[3:], by_three):
        assert_same(
            {name: each for name, each in whole.items() if "rng" not in name},
            {name: each for name, each in found.items() if "rng" not in name},
            1e-5,
        )


def test_ranks_write_the_hugging_face_folder_of_one_process(two: RankProcesses, tmp_path: Path) -> None:
    options = TrainerOptions(0, learning_rate=1e-3, lora_rank=2)
    two.call(continued, options, STEPS[:1], None, tmp_path / "two")
    one = alone(options, STEPS[:1])
    save(one, tmp_path / "one")
    mine, its = (
        {str(each.relative_to(folder)) for folder in [tmp_path / name] for each in folder.rglob("*")}
        for name in ("one", "two")
    )
    assert mine == its
    for file in ("model.safetensors", "optimiser.safetensors", "adapter/adapter_model.safetensors"):
        assert_same(load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file), 1e-5)
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "two" / "config.json").read_text()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32).state_dict()
    assert_same(one.weights(), {name: read[name] for name in one.weights()}, 1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_at_one_rank_is_an_error_at_all(two: RankProcesses, rank: int) -> None:
    assert two.call(failing, rank) == ["OSError: no space left"] * 2
    assert two.call(failing, 2) == ["", ""], "and they continue"


@pytest.mark.parametrize("more", KINDS, ids=lambda more: "-".join(more) or "plain")
def test_versions_and_state_that_ranks_push_are_whole_and_theirs(two: RankProcesses, tmp_path: Path, more: Any) -> None:
    options, name = TrainerOptions(0, learning_rate=1e-3, **more), f"test-{uuid4().hex[:12]}"
    (versions, kept), (_, same) = two.call(pushed, name, tmp_path, options, STEPS)
    try:
        with LocalParameterServer.attach(name) as reader:
            assert reader.newest() == len(STEPS)
            into = {key: torch.zeros_like(each) for key, each in versions[-1].items()}
            reader.pull(into, verify=True)
            assert_same(versions[-1], into, 0.0)
            assert reader.whole()
        for version, found in two.call(revived, options):
            assert version == len(STEPS)
            assert_same(kept, found, 0.0)
        assert_same(kept, same, 0.0)
        successor = Trainer(model_of(kind=torch.float32), options)
        reading = Standby(LocalParameterServer.attach(f"{name}-standby"), tmp_path)
        assert reading.revive(successor) == len(STEPS), "one process takes the place of two"
        assert_same(kept, state(successor), 0.0)
    finally:
        two.call(closed)
    with pytest.raises(WeightsError, match="there is no weights store"):
        LocalParameterServer.attach(name)
