"""Which ways to decode are tried when a graph is recorded."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.rollout.chain import Chain, Form
from staleflow.rollout.model_folder import ModelConfig, read_config
from staleflow.rollout.shapes import write
from staleflow.rollout.ways import ATTENDED, CHAINED, FEW, Ways, spread

CHAIN, WIDE, PARTED = CHAINED


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("shape")
    write("qwen-0.5b", folder)
    return read_config(folder)


@pytest.fixture
def ways(config: ModelConfig) -> Ways:
    model: Any = SimpleNamespace(config=config, dtype=torch.bfloat16)
    attention: Any = SimpleNamespace(page_size=32)
    few: Any = SimpleNamespace(fits=lambda rows: rows <= 32)
    return Ways(few, Chain(model, attention))


def test_the_wide_form_of_the_chain_is_tried_although_the_other_works(ways: Ways) -> None:
    """It was left out, as the second way of few.cu is where the first works."""
    tried = list[str]()
    for way in ways.worth(1, 4096):
        tried.append(way)  # and works
    assert tried == [FEW[0], CHAIN, WIDE]


@pytest.mark.parametrize(
    ("rows", "longest", "expected"),
    [
        (1, 512, [FEW[0], CHAIN]),  # the pieces of the wide form would be too short
        (40, 4096, [CHAIN]),
        (64, 4096, [CHAIN, ATTENDED]),
        (96, 4096, [CHAIN, PARTED, ATTENDED]),
        (256, 512, [PARTED, ATTENDED]),
        (512, 4096, [ATTENDED]),
    ],
)
def test_only_what_may_be_the_fastest_is_tried(ways: Ways, rows: int, longest: int, expected: list[str]) -> None:
    assert [*ways.worth(rows, longest)] == expected


def test_the_second_way_of_the_kernel_for_few_rows_is_tried_once_the_first_is_wrong(ways: Ways) -> None:
    tried = list[str]()
    for way in ways.worth(1, 512):
        tried.append(way)
        if way == FEW[0]:
            ways.failed(way)
    assert tried == [*FEW, CHAIN]
    assert [*ways.worth(2, 512)] == [FEW[1], CHAIN]


def test_a_chain_that_fails_is_not_tried_in_its_other_forms(ways: Ways) -> None:
    ways.failed(PARTED)
    assert [*ways.worth(96, 4096)] == [CHAIN, ATTENDED]
    ways.failed(CHAIN)
    assert [*ways.worth(96, 4096)] == [ATTENDED]
    assert [*ways.worth(1, 4096)] == [FEW[0]]


def test_a_way_that_was_the_fastest_twice_is_taken_alone_if_it_can_be(ways: Ways) -> None:
    assert [*ways.worth(96, 4096, settled=PARTED)] == [PARTED]
    assert [*ways.worth(1, 512, settled=WIDE)] == []
    assert [*ways.worth(96, 4096, settled="plain")] == []


def test_without_kernels_of_its_own_a_gpu_decodes_plainly() -> None:
    assert [*Ways(None, None).worth(1, 512)] == []


def test_every_form_of_the_chain_has_a_name() -> None:
    assert sorted(CHAINED.values()) == sorted({Form(), Form(wide=True), Form(parted=True)})


def test_ways_are_compared_where_few_contexts_are_long() -> None:
    """With contexts of one length a way was chosen that took twice as long in runs, where all wait for the longest."""
    for rows in (2, 40, 256):
        found = spread(rows, 4095)
        assert len(set(found)) > 0.9 * rows
        assert found.min() < 4095 / 10 < 4095 / 2 < found.max() <= 4095
        assert np.median(found) < 4095 / 3
        assert rows == 2 or not (np.diff(found) > 0).all()
    assert spread(1, 4095) == [2047]
