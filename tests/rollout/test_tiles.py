"""The layout of a step with prefill: every token once, at its place, in a tile of its own sequence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staleflow.rollout.tiles import Spans, tiled

SPANS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 50)), min_size=1, max_size=12)


@given(SPANS, st.sampled_from([1, 4, 16]), st.sampled_from([1, 3, 16]), st.randoms())
def test_every_token_is_in_one_tile_with_the_pages_of_its_own_sequence(
    drawn: list[tuple[int, int]], page: int, most: int, random: "np.random.Generator"
) -> None:
    starts, lengths = (np.array(each, np.int64) for each in zip(*drawn, strict=True))
    width = -(-120 // page)
    numbers = list(range(len(drawn) * width))
    random.shuffle(numbers)
    tables = np.array(numbers, np.int64).reshape(len(drawn), width)
    spans = Spans.of(starts, lengths, tables, page)
    tokens = [(span, start + at) for span, (start, length) in enumerate(drawn) for at in range(length)]
    assert spans.positions.tolist() == [position for _, position in tokens]
    slots = [int(tables[span, position // page]) * page + position % page for span, position in tokens]
    assert spans.slots.tolist() == slots
    seen = list[int]()
    contexts = list[int]()
    for first, count, start, pages in tiled(spans, most).T.tolist():
        assert 1 <= count <= most
        contexts.append(start + count)
        for at in range(count):
            span, position = tokens[first + at]
            assert position == start + at
            assert spans.pages[pages + position // page] == tables[span, position // page]
            seen.append(first + at)
    assert sorted(seen) == list(range(len(tokens)))
    assert contexts == sorted(contexts, reverse=True)
