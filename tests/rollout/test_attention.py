"""Decoding over pages gives what plain attention gives, by whichever way the pages are reached."""

import numpy as np
import pytest
import torch

from staleflow.rollout import attention as module
from staleflow.rollout.attention import Geometry, Layout, PagedAttention, choose

GEOMETRY = Geometry(layers=2, heads=6, kv_heads=2, head_dim=16)
SIZE = 8


def plain(held: PagedAttention, layer: int, query: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    """Attention of one sequence's query, written down as the definition says."""
    entries = held.entries[layer].view(4, -1, SIZE, 16)[:, table].reshape(4, -1, 16)[:, :length].double()
    keys, values = entries[:2].repeat_interleave(3, 0), entries[2:].repeat_interleave(3, 0)
    weights = torch.softmax(torch.einsum("hd,htd->ht", query.double(), keys) / 4, -1)
    return torch.einsum("ht,htd->hd", weights, values).reshape(-1)


def tables_of(kind: str, widths: list[int]) -> list[list[int]]:
    chance = np.random.default_rng(len(kind))
    total = sum(widths)
    if kind == "together":
        pages = chance.permutation(total) + 5
    elif kind == "apart":
        pages = chance.permutation(total) * 7 + 3
    else:  # the first two pages belong to all
        fresh = iter(chance.permutation(total) + 2)
        pages = np.concatenate([[1, 0, *(next(fresh) for _ in range(width - 2))] for width in widths])
    return [part.tolist() for part in np.split(pages, np.cumsum(widths)[:-1])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small", [0, 2 << 20])
@pytest.mark.parametrize("kind", ["together", "apart", "shared"])
def test_every_way_to_the_pages_gives_plain_attention(
    monkeypatch: pytest.MonkeyPatch, kind: str, small: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "SMALL", small)
    torch.manual_seed(0)
    lengths = np.array([75, 40, 40, 33, 24, 17, 17], np.int64)
    widths = (-(-lengths // SIZE)).tolist()
    listed = tables_of(kind, widths)
    held = PagedAttention(GEOMETRY, pages=400, page_size=SIZE, dtype=dtype)
    for layer in held.entries:
        layer.normal_()
    tables = np.full((len(lengths), 16), held.null_page, np.int64)
    for row, pages in zip(tables, listed, strict=True):
        row[: len(pages)] = pages
    slots = tables[np.arange(len(lengths)), (lengths - 1) // SIZE] * SIZE + (lengths - 1) % SIZE
    held.begin(Layout(slots, tables, lengths, []))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for layer in range(2):
        query, entries = torch.randn(7, 6, 16).to(dtype), torch.randn(7, 4, 16).to(dtype)
        out = held.attend(layer, query, entries)
        for at, table in enumerate(listed):
            expected = plain(held, layer, query[at], table, int(lengths[at]))
            assert torch.allclose(out[at].double(), expected, atol=tolerance)


def test_pages_that_lie_together_are_read_in_place_and_those_apart_are_gathered() -> None:
    widths = np.array([3, 2])
    together = choose(np.array([[4, 2, 6], [3, 5, 99]]), widths)
    assert (together.begin, together.end, len(together.gathered)) == (2, 7, 0)
    apart = choose(np.array([[4, 200, 6], [3, 50, 99]]), widths)
    assert (apart.begin, apart.end, apart.gathered.tolist()) == (0, 0, [4, 200, 6, 3, 50])
    shared = choose(np.array([[4, 2, 6], [4, 5, 99]]), widths)
    assert (shared.begin, shared.end, shared.gathered.tolist()) == (2, 7, [4])
    assert shared.owner[shared.items].tolist() == [0, 0, 0, 1, 1]
