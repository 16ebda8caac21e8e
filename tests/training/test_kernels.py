"""Triton's kernels of the trainer compute what the plain ones do."""

from typing import Any

import pytest
import torch

from staleflow.training.pieces import Layout, Sizes
from tests.kernels import DEVICE, DTYPES, INTERPRETED, kernels_of
from tests.training import plain_kernels as plain

kernels = kernels_of("staleflow.training.kernels")
KIND = DTYPES[-1]
ROWS, HIDDEN = 37, 48


def random(*shape: int, kind: torch.dtype = KIND) -> Any:
    return torch.randn(shape, device=DEVICE).to(kind)


def near(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        apart = (one.double() - other.double()).norm() / (1e-6 + other.double().norm())
        assert apart < (5e-3 if one.dtype == torch.bfloat16 else 2e-5), apart


@pytest.mark.parametrize("adds", [False, True])
def test_norms(adds: bool) -> None:
    torch.manual_seed(0)
    residual, branch = random(ROWS, HIDDEN, kind=torch.float32), random(ROWS, HIDDEN) if adds else None
    weight, again = random(HIDDEN, kind=torch.float32), residual.clone()
    found = kernels.add_norm(residual, branch, weight, 1e-5, KIND)
    expected = plain.add_norm(again, branch, weight, 1e-5, KIND)
    near((*found, residual), (*expected, again))
    d_normed, d_residual = random(ROWS, HIDDEN), random(ROWS, HIDDEN, kind=torch.float32) if adds else None
    parts, wanted = torch.full((2, 5, HIDDEN), torch.nan, device=DEVICE)
    held = d_residual.clone() if d_residual is not None else None
    found = kernels.norm_backward(d_normed, found[1], found[2], weight, d_residual, parts)
    near(found, plain.norm_backward(d_normed, expected[1], expected[2], weight, held, wanted))
    near([parts.sum(0)], [wanted.sum(0)])


@pytest.mark.parametrize("heads", [(3, 1), (4, 2)])
@pytest.mark.parametrize("size", [8, 24])
def test_rotation(heads: tuple[int, int], size: int) -> None:
    torch.manual_seed(0)
    queries, keys = heads
    qkv = random(ROWS, queries + 2 * keys, size)
    cos, sin = random(ROWS, size // 2, kind=torch.float32), random(ROWS, size // 2, kind=torch.float32)
    again = qkv.clone()
    kernels.rotate(qkv, cos, sin, queries + keys)
    plain.rotate(again, cos, sin, queries + keys)
    near([qkv], [again])
    query, key, value = (random(ROWS, count, size) for count in (queries, keys, keys))
    found, expected = (each.rotate_back(query, key, value, cos, sin) for each in (kernels, plain))
    near([found], [expected])


def test_gates() -> None:
    torch.manual_seed(0)
    both, d_out = random(ROWS, 2 * 1500), random(ROWS, 1500)
    near([kernels.swiglu(both)], [plain.swiglu(both)])
    both_again, d_again = both.clone(), d_out.clone()
    kernels.swiglu_backward(both, d_out)
    plain.swiglu_backward(both_again, d_again)
    near([both, d_out], [both_again, d_again])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropic", [False, True])
def test_log_probabilities(temperature: float, entropic: bool) -> None:
    torch.manual_seed(0)
    logits = 3 * random(ROWS, 9000)
    targets = torch.randint(9000, (ROWS,), device=DEVICE)
    found = kernels.log_probs(logits, targets, temperature)
    expected = plain.log_probs(logits, targets, temperature)
    near(found, expected)
    d_logprobs, d_entropies = random(2, ROWS, kind=torch.float32)
    rest: Any = (targets, *expected[1:], d_logprobs, d_entropies if entropic else None, temperature)
    again = logits.clone()
    kernels.log_probs_backward(logits, *rest)
    plain.log_probs_backward(again, *rest)
    near([logits], [again])


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("sizes", [([3, 1, 33], [0, 0, 0]), ([20, 19, 13, 6], [0, 11, 11, 0])], ids=["whole", "shared"])
def test_attention(sizes: tuple[list[int], list[int]]) -> None:
    torch.manual_seed(0)
    layout, scale = Layout.of(Sizes(*sizes)), 0.125
    pieces = layout.pieces(lambda values: torch.from_numpy(values).to(DEVICE))
    rows = sum(pieces.lengths)
    qkv, d_out = random(rows, 8, 64), random(rows, 4, 64)
    out, kept = kernels.attend(qkv, 4, pieces, scale)
    expected, _ = plain.attend(qkv, 4, pieces, scale)
    near([out], [expected])
    found = kernels.attend_backward(d_out, qkv, out, kept, pieces, scale)
    for one, other in zip(found, plain.attend_backward(d_out, qkv, out, None, pieces, scale), strict=True):
        assert (one - other).float().norm() < 2e-2 * other.float().norm()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_sums_of_products() -> None:
    torch.manual_seed(0)
    left, right, gradient = random(ROWS, 16), random(ROWS, 24), random(16, 24, kind=torch.float32)
    again = gradient.clone()
    kernels.accumulate(gradient, left, right)
    plain.accumulate(again, left, right)
    near([gradient], [again])
