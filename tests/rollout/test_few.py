"""The kernel for few sequences, emulated on the CPU: the same source, compiled for a GPU of fibers (emulation.h)."""

import ctypes
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.rollout import chain_plan, few
from staleflow.rollout.attention import Geometry
from staleflow.rollout.model_folder import ModelConfig
from staleflow.rollout.nvrtc import text_of
from tests.rollout.decoding_case import BIASED, QWEN3, Case, compiled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
DIVIDED = {"intermediate_size": 2560, "hidden_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": False}


def emulated(case: Case, blocks: int, polled: bool) -> torch.Tensor:
    options = few.macros(case.model.config, case.page, case.rows, blocks, polled)
    library = compiled(case.folder, "few", text_of(*few.SOURCES[1:]), options)
    memory = few.Memory(case.model, case.attention, blocks)
    step = memory.step(case.given, case.last, case.positions, case.tables)
    assert library.emulate(ctypes.byref(step), case.rows) is None
    return memory.logits[: case.rows].float()


@pytest.mark.parametrize(
    ("config", "lengths", "blocks", "page", "polled"),
    [
        ({}, [37], 3, 16, True),
        (BIASED | {"hidden_size": 1056, "head_dim": 64}, [1, 400], 3, 16, False),
        (QWEN3, [1500, 16, 17], 16, 32, True),
        ({"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 384}, [300, 129, 5], 7, 16, True),
        (DIVIDED, [1 + 9 * at for at in range(17)], 5, 16, True),
    ],
    ids=["one", "biased-in-cuts-at-barriers", "qwen3-in-pieces", "square-in-pieces", "many-with-divided-columns"],
)
def test_a_step_equals_the_plain_path(
    tmp_path: Path, config: dict[str, Any], lengths: list[int], blocks: int, page: int, polled: bool
) -> None:
    case = Case(tmp_path, config, lengths, page)
    exact = case.exact()
    assert case.equals(emulated(case, blocks, polled), exact)
    assert case.leaves_others_alone(exact[1])


def test_a_kernel_that_waits_in_vain_comes_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that never come are not numbers, and neither are the logits: the step fails instead of hanging."""
    case = Case(tmp_path, {}, [37], 16)
    monkeypatch.setattr(few, "PATIENCE", 0)
    assert not torch.isfinite(emulated(case, 3, polled=True)).any()


def test_every_divided_product_is_complete() -> None:
    """Parts and tiles cover all columns and rows, and no block has two parts."""
    for hidden in (64, 576, 896, 1536, 3584, 5120):
        for wide in (160, 1536, 4864, 8960, 18_944):
            for tiles in (1, 2, 4):
                parts, each = few.divided(hidden, wide, tiles, 132)
                assert 1 <= parts <= wide // 32
                units = math.ceil(math.ceil(hidden / 16) / each) * parts
                assert parts == 1 or units <= 132


SIZES = st.one_of(st.integers(1, 40), st.integers(1, 600).map(lambda tiles: 32 * tiles))


@given(SIZES, SIZES, st.integers(1, 40), st.integers(1, 8), st.sampled_from([1, 16, 31, 64, 128]), st.integers(1, 129))
def test_of_a_model_of_any_size_it_is_said_whether_the_kernels_are_for_it(
    hidden: int, wide: int, kv_heads: int, share: int, head_dim: int, rows: int
) -> None:
    """An instance of a model narrower than 32 columns ended at its start on an H100."""
    rest = {"vocabulary": 7, "positions": 64, "epsilon": 1e-6, "tied": True, "qk_norm": False, "source": None}
    biases = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
    geometry = Geometry(1, kv_heads * share, kv_heads, head_dim)
    config = ModelConfig(family="llama", geometry=geometry, hidden=hidden, intermediate=wide, **rest, **biases)
    if few.fits(config, torch.bfloat16, 16, rows):
        assert few.macros(config, 16, rows, blocks=132, polled=True)
    if chain_plan.fits(config, torch.bfloat16, 16, rows):
        assert chain_plan.macros(config, 16, chain_plan.rows_of_kernel(rows))


def test_what_the_kernel_works_with_is_made_when_it_is_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    case = Case(tmp_path, small, [3], 16)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert not few.FewRows(case.model, case.attention).fits(1)
