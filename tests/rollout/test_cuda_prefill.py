"""Steps with prefill on a GPU: the kernel against plain attention, and graphs against launches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from staleflow.rollout.engine import Request, Sampling
from staleflow.rollout.tiles import Spans, tiled
from tests.rollout.conftest import Tiny, drain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CUDA, PAGE = torch.device("cuda"), 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 32), (14, 2, 64), (12, 2, 128), (9, 3, 64), (4, 4, 48)])
def test_attention_of_spans_with_and_without_something_before_them(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    from staleflow.rollout import cuda_kernels as kernels

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    starts = np.array([59, 32, 6, 0, 17, 0, 16, 50, 0, 300], np.int64)
    lengths = np.array([1, 1, 1, 5, 1, 40, 16, 33, 200, 77], np.int64)
    tables = random.permutation(len(starts) * 24).reshape(len(starts), 24)
    spans = Spans.of(starts, lengths, tables, PAGE)
    found = tiled(spans, kernels.tile_tokens(heads, kv_heads, dtype))
    tiles = np.zeros((4, -(-found.shape[1] // 16) * 16 + 16), np.int32)
    tiles[:, : found.shape[1]] = found
    query = torch.randn(int(lengths.sum()), heads, size, device=CUDA).to(dtype)
    entries = torch.randn(2 * kv_heads, (tables.size + 1) * PAGE, size, device=CUDA).to(dtype)
    where = [torch.from_numpy(each.astype(np.int32)).to(CUDA) for each in (tiles, spans.pages)]
    out = kernels.attend_spans(query, entries, where[0], where[1], PAGE, size**-0.5).float()
    owner = np.repeat(np.arange(len(starts)), lengths)
    for token, (span, position) in enumerate(zip(owner, spans.positions, strict=True)):
        at = np.arange(position + 1)
        slots = torch.from_numpy(tables[span, at // PAGE] * PAGE + at % PAGE).to(CUDA)
        keys, values = entries[:, slots].float().repeat_interleave(heads // kv_heads, 0).chunk(2)
        weights = torch.softmax(query[token].float()[:, None] @ keys.transpose(1, 2) * size**-0.5, -1)
        expected = (weights @ values)[:, 0].reshape(-1)
        assert (out[token] - expected).abs().max() < (1e-4 if dtype is torch.float32 else 2e-2)


def test_an_engine_of_short_steps_is_prepared(tiny: Callable[..., Tiny]) -> None:
    """It recorded graphs of steps that it never has, for which it has no room."""
    engine = tiny("llama").engine(device="cuda", page_size=16, kv_tokens=512, max_running=4, prefill_tokens=24)
    engine.prepare()
    assert not engine.busy


def test_prefill_of_any_length_gives_what_decoding_from_the_start_gives(tiny: Callable[..., Tiny]) -> None:
    """Lengths on both sides of every graph's size and beyond the largest, in one step and in pieces."""
    model = tiny("llama")
    drawn = list[list[list[int]]]()
    for prefill_tokens, device in ((16384, "cuda"), (97, "cuda"), (512, "cpu")):
        options = {"device": device, "page_size": 16, "kv_tokens": 16384, "prefill_tokens": prefill_tokens}
        engine = model.engine(**options, max_running=40)
        random = np.random.default_rng(3)
        sampling = Sampling(max_tokens=6, temperature=0.0)
        lengths = [1, 2, 63, 64, 65, 96, 97, 120, 128, 129, 200]
        prompts = [random.integers(1, 60, length).tolist() for length in [*lengths, *lengths, *lengths[:10]]]
        engine.submit([Request(f"r{at}", 0, each, sampling=sampling) for at, each in enumerate(prompts)])
        results, _, _ = drain(engine)
        drawn.append([list(results[f"r{at}"].tokens) for at in range(len(prompts))])
    assert drawn[0] == drawn[1] == drawn[2]
