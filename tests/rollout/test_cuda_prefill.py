"""Prefill of many sequences in one call on a GPU is what one call for each gives."""

import numpy as np
import pytest
import torch

from staleflow.rollout.attention import Geometry, Layout, PagedAttention, PrefillSpan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CUDA, PAGE, HEADS, KEYS, SIZE = torch.device("cuda"), 16, 6, 2, 64


@pytest.mark.parametrize("decoding", [0, 3])
def test_spans_with_and_without_something_before_them(decoding: int) -> None:
    from staleflow.rollout.cuda import CudaAttention

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    found = []
    begun = [(0, 5), (17, 1), (0, 40), (16, 16), (50, 33)]
    pages = random.permutation(64).tolist()
    tables = np.array([[pages.pop() for _ in range(4)] for _ in range(decoding)], np.int64).reshape(decoding, 4)
    lengths = np.array([60, 33, 7][:decoding], np.int64)
    spans, first = list[PrefillSpan](), decoding
    for start, length in begun:
        spans.append(PrefillSpan(first, start, length, [pages.pop() for _ in range(-(-(start + length) // PAGE))]))
        first += length
    slots = [tables[row, (size - 1) // PAGE] * PAGE + (size - 1) % PAGE for row, size in enumerate(lengths)]
    for span in spans:
        places = np.arange(span.start, span.start + span.length)
        slots += (np.array(span.pages)[places // PAGE] * PAGE + places % PAGE).tolist()
    layout = Layout(np.array(slots, np.int64), tables, lengths, spans)
    query = torch.randn(first, HEADS, SIZE, device=CUDA).bfloat16()
    entries = torch.randn(first, 2 * KEYS, SIZE, device=CUDA).bfloat16()
    before = torch.randn(2 * KEYS, 65 * PAGE, SIZE, device=CUDA).bfloat16()
    for kind in (CudaAttention, PagedAttention):
        attention = kind(Geometry(1, HEADS, KEYS, SIZE), 64, PAGE, torch.bfloat16, CUDA)
        attention.entries[0].copy_(before)
        attention.begin(layout)
        found.append(attention.attend(0, query, entries).float())
    assert (found[0] - found[1]).abs().max() < 2e-2
