"""A model spread over ranks: the same update as in one process, and a share of its memory."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from staleflow.training.trainer import Trainer, TrainerOptions
from tests.training.rank_processes import RankProcesses, fed, half_gradients, held, model_of, state_bytes, updated
from tests.training.test_pieces import groups_of as prompted
from tests.training.test_trainer import COMBINATIONS, TERMS, groups_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(3, tmp_path_factory.mktemp("three")) as ranks:
        yield ranks


MORE: list[dict[str, Any]] = [
    {},
    {"lora_rank": 2},
    {"lora_rank": 3, "entropy_coefficient": 0.01, "activation_checkpointing": True},
    {"kl_coefficient": 0.1, "activation_checkpointing": True},
    {"clip_norm": 0.01},
    {"micro_tokens": 5},
]


def assert_as_one_process(
    ranks: RankProcesses, options: TrainerOptions, pieces: list[int], seed: int, tied: bool = False
) -> None:
    steps = [groups_of(sum(pieces), 3, seed), groups_of(sum(pieces), 3, seed + 1, version=1)]
    trainer = Trainer(model_of(tied), options)
    expected = [fed(trainer, groups, pieces) for groups in steps]
    weights = trainer.weights()
    for parameters, pushed, reports in ranks.call(updated, options, steps, pieces, tied):
        for one, other in zip(trainer.parameters, parameters, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5)
        assert pushed.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.allclose(tensor, pushed[name], rtol=0, atol=1e-5)
        for report, wanted in zip(reports, expected, strict=True):
            assert report.loss == pytest.approx(wanted.loss, abs=1e-5)
            assert report.gradient_norm == pytest.approx(wanted.gradient_norm, abs=1e-5)
            assert report.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-5)
            assert (report.updates, report.groups, report.tokens) == (wanted.updates, wanted.groups, wanted.tokens)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    combination=st.sampled_from(COMBINATIONS),
    term=st.sampled_from(TERMS + MORE),
    pieces=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    tied=st.booleans(),
)
def test_two_ranks_make_the_update_of_one_process(
    two: RankProcesses, combination: Any, term: Any, pieces: list[int], seed: int, tied: bool
) -> None:
    if tied and "train_only" in term:
        term = {}
    advantage, loss, correction = combination
    if term.get("whiten_advantages") and advantage == "reinforce++":
        term = {}
    options: dict[str, Any] = {"learning_rate": 1e-2, "max_tokens": 50} | term
    assert_as_one_process(two, TrainerOptions(0, advantage, loss, correction, **options), pieces, seed, tied)


@pytest.mark.parametrize("groups", [1, 5], ids=["a-group-is-divided", "groups-stay-together"])
def test_two_ranks_that_share_prompts_make_the_update_of_one_process(two: RankProcesses, groups: int) -> None:
    options = TrainerOptions(0, "gae", "ppo", learning_rate=1e-2, updates_per_step=2, micro_tokens=60)
    steps = [prompted([(20, [3, 5, 2, 6])] * groups, seed=version, version=version) for version in (0, 1)]
    trainer = Trainer(model_of(), options)
    for each in steps:
        fed(trainer, each, [groups])
    for parameters, _, _ in two.call(updated, options, steps, [groups]):
        for one, other in zip(trainer.parameters, parameters, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_a_rank_that_has_no_row_makes_empty_passes(three: RankProcesses) -> None:
    """One row of one group: two of three ranks have nothing to compute, also of a reference and of values."""
    options = TrainerOptions(0, "gae", "ppo", learning_rate=1e-2, kl_coefficient=0.1, updates_per_step=2)
    steps = [[[groups_of(1, 1, seed)[0][0]], [groups_of(1, 1, seed + 1)[0][0]]] for seed in (3,)]
    trainer = Trainer(model_of(), options)
    fed(trainer, steps[0], [1, 1])
    for parameters, _, _ in three.call(updated, options, steps, [1, 1]):
        for one, other in zip(trainer.parameters, parameters, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_ranks_are_fed_a_group_of_which_nothing_is_trained(two: RankProcesses) -> None:
    """Episodes that were cut off count for the others of their group and are not trained: all ranks ended on one of
    nothing else."""
    options, (group, other) = TrainerOptions(0, learning_rate=1e-2, skip_no_signal=False), groups_of(2, 3)
    cut = [msgspec.structs.replace(row, masked=True) for row in group]
    trainer = Trainer(model_of(), options)
    fed(trainer, [cut, other], [1, 1])
    for parameters, _, _ in two.call(updated, options, [[cut, other]], [1, 1]):
        for one, other_one in zip(trainer.parameters, parameters, strict=True):
            assert torch.allclose(one, other_one, rtol=0, atol=1e-5)


def test_each_of_two_ranks_holds_about_half_of_weights_gradients_and_moments(two: RankProcesses) -> None:
    options, groups = TrainerOptions(0), groups_of(4, 4)
    alone = Trainer(model_of(), options)
    alone.feed(0, groups)
    assert max(two.call(held, options, groups)) <= 0.55 * state_bytes(alone)


@pytest.mark.parametrize("more", [{}, {"lora_rank": 2}, {"advantage": "gae"}], ids=["plain", "lora", "values"])
def test_blocks_gathered_in_bfloat16_give_gradients_near_those_in_float32(two: RankProcesses, more: Any) -> None:
    options, groups = TrainerOptions(0, skip_no_signal=False, **more), groups_of(4, 4)
    alone = Trainer(model_of(kind=torch.float32), options)
    alone.feed(0, groups)
    wanted = torch.cat([each.grad.flatten() for each in alone.parameters if each.grad is not None])
    for found in two.call(half_gradients, options, groups):
        assert {each.dtype for each in found} == {torch.float32}
        assert torch.linalg.norm(torch.cat([each.flatten() for each in found]) - wanted) < 0.05 * wanted.norm()
