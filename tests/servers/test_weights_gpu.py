"""What a push from a GPU does without one: runs of neighbours, and checksums in shares."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.servers.weights import gpu
from staleflow.servers.weights.tensors import SlotLayout, digest_of
from tests.training.batches import quick

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=12)


@quick(40)
@given(shapes=SHAPES, count=st.integers(1, 5), staged=st.integers(1, 3000))
def test_every_tensor_is_in_one_run_and_in_one_share(shapes: list[tuple[int, int]], count: int, staged: int) -> None:
    tensors = {f"w{at}": torch.randn(shape) for at, shape in enumerate(shapes)}
    layout = SlotLayout.of(tensors, None)
    memory = torch.randint(0, 256, (layout.size,), dtype=torch.uint8)
    numbered = [(number, entry, tensors[entry.name]) for number, entry in enumerate(layout.entries)]
    before, gpu.STAGED = gpu.STAGED, staged
    try:
        runs = list(gpu._runs(numbered))
    finally:
        gpu.STAGED = before
    assert [each for run in runs for each in run] == numbered
    for run in runs:
        assert all(one[1].stop == other[1].start for one, other in itertools.pairwise(run))
        assert len(run) == 1 or run[-1][1].stop - run[0][1].start <= staged
    places = [(number, entry) for number, entry, _ in numbered]
    split = gpu.shares(places, count)
    assert sorted(number for share in split for number, _ in share) == list(range(len(places)))
    found = {number: digest for share in split for number, digest in gpu.digests(memory.data_ptr(), share).items()}
    assert found == {n: digest_of(memory.data_ptr() + e.start, e.stop - e.start) for n, e in places}
