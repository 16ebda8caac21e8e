"""Triton's kernels of the engine against plain arithmetic."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from staleflow.rollout.tiles import Spans, tiled
from tests.kernels import DEVICE, DTYPES, INTERPRETED, kernels_of

kernels = kernels_of("staleflow.rollout.cuda_kernels")
MANY = pytest.mark.skipif(INTERPRETED, reason="needs a GPU: too many for an interpreter")


@pytest.fixture(autouse=True)
def unwritten() -> Iterator[None]:
    """What nobody has written is not a number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found.float() - expected).abs().max() < (1e-4 if found.dtype is torch.float32 else 2e-2))


def attended(query: torch.Tensor, entries: torch.Tensor, slots: Any) -> torch.Tensor:
    """One query of all heads over these slots."""
    keys, values = entries[:, slots].float().repeat_interleave(2 * len(query) // len(entries), 0).chunk(2)
    weights = torch.softmax(query.float()[:, None] @ keys.transpose(1, 2) * query.shape[1] ** -0.5, -1)
    return (weights @ values)[:, 0].reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size"), [(5, 6, 2, 32), (9, 14, 2, 64), pytest.param(300, 12, 2, 128, marks=MANY)]
)
def test_attention_over_pages(rows: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    page, width = 32, 16
    torch.manual_seed(rows)
    query = torch.randn(rows, heads, size).to(DEVICE, dtype)
    entries = torch.randn(2 * kv_heads, (rows * width + 1) * page, size).to(DEVICE, dtype)
    tables = torch.randperm(rows * width).int().view(rows, width).to(DEVICE)
    lengths = torch.randint(1, width * page + 1, (rows,), dtype=torch.int32).to(DEVICE)
    lengths[0] = 1
    found = kernels.attend(query, entries, tables, lengths, page, size**-0.5)
    for row, length in enumerate(lengths.tolist()):
        at = torch.arange(length, device=DEVICE)
        assert near(found[row], attended(query[row], entries, tables[row].long()[at // page] * page + at % page))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 32), (14, 2, 64), (12, 2, 128), (9, 3, 64), (4, 4, 48)])
def test_attention_of_spans_with_and_without_something_before_them(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    random, page = np.random.default_rng(0), 16
    starts = np.array([59, 32, 6, 0, 17, 0, 16, 50, 0, 300], np.int64)
    lengths = np.array([1, 1, 1, 5, 1, 40, 16, 33, 200, 77], np.int64)
    tables = random.permutation(len(starts) * 24).reshape(len(starts), 24)
    spans = Spans.of(starts, lengths, tables, page)
    found = tiled(spans, kernels.tile_tokens(heads, kv_heads, dtype))
    tiles = np.zeros((4, -(-found.shape[1] // 16) * 16 + 16), np.int32)
    tiles[:, : found.shape[1]] = found
    query = torch.randn(int(lengths.sum()), heads, size).to(DEVICE, dtype)
    entries = torch.randn(2 * kv_heads, (tables.size + 1) * page, size).to(DEVICE, dtype)
    where = [torch.from_numpy(each.astype(np.int32)).to(DEVICE) for each in (tiles, spans.pages)]
    out = kernels.attend_spans(query, entries, where[0], where[1], page, size**-0.5)
    owner = np.repeat(np.arange(len(starts)), lengths)
    for token, (span, position) in enumerate(zip(owner, spans.positions, strict=True)):
        at = np.arange(position + 1)
        assert near(out[token], attended(query[token], entries, tables[span, at // page] * page + at % page))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slotted", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("size", [48, 64])
def test_rotated_heads_are_stored_where_they_belong_and_nowhere_else(
    size: int, normed: bool, slotted: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    rows, heads, kv_heads, page, width = 7, 6, 2, 16, 4
    qkv = torch.randn(rows, heads + 2 * kv_heads, size).to(DEVICE, dtype)
    weights = [(1 + 0.1 * torch.randn(size)).to(DEVICE, dtype) for _ in "qk"]
    angles = torch.randn(page * width, size // 2).repeat(1, 2)
    turns = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)
    positions = torch.randint(page * width, (rows,), dtype=torch.int32).to(DEVICE)
    tables = torch.randperm(rows * width).int().view(rows, width).to(DEVICE)
    slots = tables.long().gather(1, (positions.long() // page)[:, None])[:, 0] * page + positions % page
    entries = torch.randn(2 * kv_heads, rows * width * page, size).to(DEVICE, dtype)
    expected, x = entries.clone(), qkv.float().clone()
    if normed:
        scaled = functional.rms_norm(x, (size,), eps=1e-5).to(dtype).float()
        x[:, :heads] = scaled[:, :heads] * weights[0].float()
        x[:, heads:-kv_heads] = scaled[:, heads:-kv_heads] * weights[1].float()
    cos, sin = (each.float()[positions.long(), None] for each in turns)
    turned = x[:, :-kv_heads]
    turned = turned * cos + torch.cat((-turned[..., size // 2 :], turned[..., : size // 2]), -1) * sin
    expected[:, slots] = torch.cat((turned[:, heads:], x[:, -kv_heads:]), 1).transpose(0, 1).to(dtype)
    norms = (weights[0], weights[1]) if normed else (None, None)
    where = slots.int() if slotted else tables
    query = kernels.rotate_and_store(qkv, norms, turns, positions, where, entries, heads, page, 1e-5)
    assert near(query.flatten(1), turned[:, :heads].flatten(1))
    assert near(entries, expected.float())
    others = torch.ones(entries.shape[1], dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    assert torch.equal(entries[:, others], expected[:, others])


def test_picking_follows_the_distribution() -> None:
    torch.manual_seed(1)
    rows, vocabulary = (9, 20_000) if INTERPRETED else (64, 151_936)
    logits = torch.randn(rows, vocabulary).to(DEVICE) * 3
    heat = torch.ones(rows, device=DEVICE)
    heat[::3], heat[1::3] = 0, 0.7
    uniforms = torch.rand(rows, dtype=torch.float64).to(DEVICE)
    tokens = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    logprobs = kernels.pick(logits, heat, uniforms, tokens)
    every = torch.log_softmax(logits.double() / torch.where(heat == 0, 1, heat)[:, None], -1)
    drawn = (every.exp().cumsum(-1) <= uniforms[:, None]).sum(-1)
    assert torch.equal(tokens, torch.where(heat == 0, logits.argmax(-1), drawn))
    assert (logprobs - every.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("place", [0, 3000, 4999])
def test_a_logit_that_is_no_number_shows_in_every_block_of_the_vocabulary(place: int) -> None:
    """It did in the first one only: a damaged row of the head went unnoticed, and tokens behind it were never drawn."""
    logits = torch.randn(4, 5000, device=DEVICE)
    logits[1:, place] = torch.tensor([torch.nan, torch.nan, torch.inf])
    heat, uniforms = torch.tensor([1.0, 1.0, 0.0, 1.0], device=DEVICE), torch.full((4,), 0.4, device=DEVICE).double()
    logprobs = kernels.pick(logits, heat, uniforms, torch.empty(4, dtype=torch.int64, device=DEVICE))
    assert torch.isfinite(logprobs).tolist() == [True, False, False, False]


@MANY
def test_the_gate_of_more_values_than_an_int_counts() -> None:
    wide = 18_944
    both = torch.zeros(2**31 // (2 * wide) + 2, 2 * wide, dtype=torch.bfloat16, device=DEVICE)
    both[-1].normal_()
    assert torch.equal(kernels.gate(both)[-1:], kernels.gate(both[-1:].clone()))


@pytest.mark.parametrize("adds", [False, True])
def test_norm_and_gate(adds: bool) -> None:
    torch.manual_seed(2)
    x, y, weight = torch.randn(3, 1536).to(DEVICE), torch.randn(3, 1536).to(DEVICE), torch.rand(1536).to(DEVICE)
    summed = x + y if adds else x.clone()
    found = kernels.add_and_norm(x, y if adds else None, weight, 1e-6)
    assert torch.equal(x, summed)
    assert near(found, functional.rms_norm(summed, (1536,), weight, 1e-6))
    assert near(kernels.gate(x), functional.silu(x[:, :768]) * x[:, 768:])


@pytest.mark.parametrize("sizes", [(3000, 7), (1, 1024), (5, 5)])
def test_two_arrays_are_moved_whole_and_no_further(sizes: tuple[int, int]) -> None:
    torch.manual_seed(3)
    pairs = [(torch.randn(size).to(DEVICE), torch.zeros(size + 9, device=DEVICE)) for size in sizes]
    first, second = ((source, target[:size]) for (source, target), size in zip(pairs, sizes, strict=True))
    kernels.move(first, second)
    for (source, target), size in zip(pairs, sizes, strict=True):
        assert torch.equal(target[:size], source)
        assert not target[size:].any()
