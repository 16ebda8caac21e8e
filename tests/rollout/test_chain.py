"""The chain of kernels, emulated on the CPU: the same source, compiled for a GPU of fibers (emulation.h)."""

import ctypes
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleflow.rollout import chain, chain_plan
from staleflow.rollout.model_folder import ModelConfig, read_config
from staleflow.rollout.nvrtc import SHARED_MEMORY, text_of
from staleflow.rollout.shapes import LARGE, SHAPES, write
from tests.rollout.decoding_case import BIASED, QWEN3, Case, compiled, run_chain

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
SMALL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
LONG = {"hidden_size": 64, "intermediate_size": 1152, "num_attention_heads": 8, "num_hidden_layers": 1}
WIDEST = {**SMALL, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
THIRDS = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6}
EVEN = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
LARGE_PARTS = {"qkv": (16, 2), "out": (32, 1), "up": (32, 1), "down": (64, 2)}
SMALL_PARTS = {"qkv": (16, 1), "out": (8, 1), "up": (32, 1), "down": (32, 4)}
RAGGED = [1, 16, 17, 2, 33, 15, 31, 32, 48]
BULK = [64, *range(1, 24)]
"""Contexts of more sequences than sums are sent one by one for."""


def memory_for(stages: int, rows: int) -> dict[int, int]:
    """Room for a ring of so many stages, with kernels for so many sequences."""
    stage, sums = 2 * chain_plan.DEPTH * (chain_plan.TILE + rows), 4 * (chain_plan.TILE + 4) * rows
    return dict.fromkeys(chain_plan.MEMORY, stages * (stage + 16) + sums + 4 * rows + 32)


WAITS = {
    "kernels": r"await_before\(\)",
    "copies": r"gate_wait\(&s\.full[^;]*",
    "room in the ring": r"gate_wait\(&s\.empty[^;]*",
    "products": r"products_wait<\d>\(\)",
    "sums": r"gate_wait\(&s\.all[^;]*",
    "warps": r"meet_group\(\)",
    "gates of others": r"meet_cluster\(\)(?!;  // the others)",
    "sent to others": r"meet_cluster\(\)(?=;  // the others)",
}
"""Every kind of wait in the kernels."""


def program(case: Case, form: chain_plan.Form = chain_plan.WHOLE, switched: bool = False) -> ctypes.CDLL:
    """The kernels of a case. ``switched``: each kind of wait can be left out (``left_out``, by its place in WAITS)."""
    assert chain_plan.fits(case.model.config, torch.bfloat16, case.page, case.rows)
    text = text_of(*dict.fromkeys([*chain.PRODUCTS[1:], *chain.ATTENTION[1:]]))
    for number, wait in enumerate(WAITS.values() if switched else ()):
        skipped = rf"void(left_out == {number} || (\g<0>, true))"
        text, places = re.subn(rf"\b{wait}(?=;)", skipped, text)
        assert places, "the kernels have no such call"
    of_model = case.model.config, case.page
    attention = chain_plan.macros(*of_model, chain_plan.ANY_ROWS)
    products = chain_plan.macros(*of_model, chain_plan.rows_of_kernel(case.rows, form.parted), form.parted)
    return compiled(case.folder, "chain", 'extern "C" int left_out = -1;\n' + text, attention | products)


@needs_compiler
@pytest.mark.parametrize(
    ("config", "lengths", "page", "tuned"),
    [
        (SMALL | BIASED, RAGGED, 16, {}),
        (QWEN3 | {"hidden_size": 64, "intermediate_size": 128}, [1, 300, *RAGGED], 32, {"LEAST_PIECE": 32}),
        (THIRDS, [64, *range(1, 38)], 16, {"MEMORY": memory_for(2, 64), "LEAST_PIECE": 16}),
        (SMALL, BULK, 64, {"MANY": 32, "LEAST_PIECE": 16}),
        (WIDEST, [1 + at % 19 for at in range(65)], 16, {}),
        (
            EVEN,
            [1 + at % 19 for at in range(70)],
            16,
            {"PARTS": {128: LARGE_PARTS}, "MEMORY": dict.fromkeys((2, 3), 1)},
        ),
        (EVEN, [1 + at % 99 for at in range(40)], 16, {"PARTS": {128: SMALL_PARTS}, "MULTIPROCESSORS": 1, "PIECES": 1}),
        pytest.param(
            LONG | {"num_attention_heads": 16},
            [*RAGGED, 129],
            16,
            {"MEMORY": memory_for(3, 16), "CLUSTER": 2, "PIECES": 2, "LEAST_PIECE": 16},
            marks=pytest.mark.slow,
        ),
        (LONG, RAGGED[:7], 16, {"MEMORY": memory_for(2, 8), "CLUSTER": 1, "PIECES": 1}),
        (SMALL, [700], 32, {"RING_OF_ATTENTION": 0}),
        (QWEN3 | {"hidden_size": 64, "intermediate_size": 128}, [900, 7], 16, {"PIECES": 16, "LEAST_PIECE": 16}),
    ],
    ids=[
        "biased",
        "qwen3-in-8-pieces",
        "two-tiles-of-rows",
        "sums-in-one-copy",
        "widest",
        "parts-in-short-rings",
        "small-parts-and-a-crowd",
        "short-ring-2-pieces",
        "shorter-ring-undivided",
        "one-long",
        "qwen3-in-16-pieces",
    ],
)
def test_a_step_equals_the_plain_path_whatever_its_timing(
    tmp_path: Path,
    config: dict[str, Any],
    lengths: list[int],
    page: int,
    tuned: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in tuned.items():
        monkeypatch.setattr(chain_plan, name, value)
    case = Case(tmp_path, config, lengths, page)
    form = chain_plan.PARTED if "PARTS" in tuned else chain_plan.WHOLE
    exact, library = case.exact(), program(case, form)
    before = [entries.clone() for entries in case.attention.entries]
    found = run_chain(case, library, 1, form)
    assert case.equals(found, exact)
    assert case.leaves_others_alone(exact[1])
    after = [entries.clone() for entries in case.attention.entries]
    for seed in (2, 3):
        case.restore(before)
        assert torch.equal(run_chain(case, library, seed, form), found)
        assert all(map(torch.equal, case.attention.entries, after))


@needs_compiler
def test_every_missing_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the emulation is blind to one, the tests above would not show a race."""
    tuned = {"MEMORY": memory_for(2, 32), "CLUSTER": 4, "MANY": 32, "LEAST_PIECE": 16}
    tuned |= {"PIECES": 4, "RING_OF_ATTENTION": 0}
    for name, value in tuned.items():
        monkeypatch.setattr(chain_plan, name, value)
    case = Case(tmp_path, LONG | {"hidden_size": 192, "num_attention_heads": 16}, [*BULK, 129], 16)
    exact, library = case.exact(), program(case, switched=True)
    before = [entries.clone() for entries in case.attention.entries]

    def passes(seed: int) -> bool:
        case.restore(before)
        try:
            return case.equals(run_chain(case, library, seed), exact)
        except RuntimeError:  # the emulation says what went wrong
            return False

    left_out = ctypes.c_int.in_dll(library, "left_out")
    assert all(map(passes, range(3)))
    for number, name in enumerate(WAITS):
        left_out.value = number
        assert not all(map(passes, range(8))), name


@pytest.fixture(scope="module", params=[*SHAPES, *LARGE])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("shape")
    write((SHAPES | LARGE)[request.param], folder)
    found = read_config(folder)
    if not chain_plan.fits(found, torch.bfloat16, 16, 1):
        pytest.skip("the chain is not for this shape")
    return found


def test_every_product_has_all_its_columns_and_room_on_a_multiprocessor(config: ModelConfig) -> None:
    _, heads, _, head_dim = config.geometry
    columns = {"qkv": config.hidden, "out": heads * head_dim, "up": config.hidden, "down": config.intermediate}
    for rows, parted in [
        *((rows, False) for rows in chain_plan.SIZES),
        *((rows, True) for rows in chain_plan.PARTED_SIZES),
    ]:
        for name, shape in chain_plan.shapes_of(config, rows, parted).items():
            # a cluster has 1, 2, 4 or 8 blocks, each of which has some of the columns
            each, split = shape.division
            assert split in (1, 2, 4, 8)
            assert split <= columns[name] // chain_plan.DEPTH
            for some in (1, each, each + 1, rows):
                parts = len(range(0, some, each))
                assert shape.blocks(some) == shape.tiles * split * parts
            # of sixty-four or fewer sequences, two blocks are on a multiprocessor, which keeps 1 KiB for each
            assert shape.shared_memory <= SHARED_MEMORY
            assert rows > 64 or 2 * (shape.shared_memory + 1024) <= 228 * 1024
            # sums take the place of the ring
            assert shape.stages > 1
            assert shape.stages * 2 * chain_plan.DEPTH * (chain_plan.TILE + each) >= each * (chain_plan.TILE + 4) * 4
    for page in (16, 32, 64):
        for few in (False, True):
            stages = chain_plan.attention_stages(config, page, few)
            assert 2 <= stages <= chain_plan.MOST_STAGES
            assert stages * page % 64 == 0, "four warps of 16 tokens each come round to the same pages of the ring"
            assert chain_plan.attention_kept(config) + stages * 4 * head_dim * page <= SHARED_MEMORY


@pytest.mark.parametrize("wide", [False, True])
def test_every_context_is_cut_into_pieces_that_are_long_enough(wide: bool) -> None:
    for rows in (1, 32, chain_plan.MOST_ROWS):
        for kv_heads in (1, 2, 8):
            for longest in (16, 127, 128, 1000, 100_000):
                pieces = chain_plan.pieces_of(rows, kv_heads, longest, wide)
                assert pieces in (1, 2, 4, 8, 16)  # there is a kernel for each
                assert pieces <= (chain_plan.LARGEST if wide else chain_plan.PIECES)
                assert pieces == 1 or longest // pieces >= chain_plan.LEAST_PIECE
                assert pieces == 1 or rows * kv_heads * pieces < 6 * chain_plan.ATTENDING
                assert pieces == 1 or longest > chain_plan.SHORT or rows * kv_heads < chain_plan.MULTIPROCESSORS


def test_contexts_that_may_be_long_are_cut_in_two_where_hundreds_run_and_short_ones_are_not() -> None:
    """Everybody waited for the longest, or for joining pieces that took no time."""
    assert [chain_plan.pieces_of(rows, 2, 4096) for rows in (128, 256, 512)] == [2, 2, 1]
    assert [chain_plan.pieces_of(rows, 2, 512) for rows in (64, 96, 256)] == [2, 1, 1]


def test_rings_are_short_where_more_blocks_would_not_fit_at_once(tmp_path: Path) -> None:
    """A second wave of blocks waited until the first had ended: 256 sequences took 1.20 instead of 1.11 ms."""

    def stages(shape: str, rows: int, longest: int) -> tuple[str, int]:
        folder = tmp_path / shape
        folder.mkdir(exist_ok=True)
        write(shape, folder)
        model: Any = SimpleNamespace(config=read_config(folder), turns=(torch.zeros(1), torch.zeros(1)))
        attention: Any = SimpleNamespace(page_size=32)
        layer: Any = SimpleNamespace(query_norm=None, key_norm=None)
        entries, tables = torch.zeros(4, 32, 64), torch.zeros(rows, longest // 32, dtype=torch.int32)
        positions, some = torch.zeros(rows, dtype=torch.int32), torch.zeros(1)
        link = chain.attending(model, attention, lambda *_: None, layer, entries, some, some, positions, tables)
        context: Any = link.arguments[1]
        return link.name, context.stages

    assert stages("qwen-0.5b", 256, 512) == ("attend_crowd", 4)
    assert stages("qwen-0.5b", 160, 512) == ("attend_crowd", 4)
    assert stages("qwen-0.5b", 128, 512) == ("attend_1", 8)
    assert stages("qwen-0.5b", 256, 4096) == ("attend_2", 4)
    assert stages("qwen-0.5b", 160, 4096) == ("attend_2", 8)
    assert stages("qwen-0.5b", 32, 512) == ("attend_2", 4)
    assert stages("qwen-1.5b", 256, 512) == ("attend_1", 4)
