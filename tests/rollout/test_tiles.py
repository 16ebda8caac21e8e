"""The layout of a step with prefill: every token once, at its place, in a tile of its own sequence; and its room."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staleflow.rollout.tiles import GRAPHED, PREPARED, Spans, prepared_for, tiled, tiles_for, tokens_for

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


@given(SPANS, st.sampled_from([1, 3, 16]), st.integers(0, 4))
def test_a_step_has_no_more_tiles_than_there_is_room_for(drawn: list[tuple[int, int]], most: int, others: int) -> None:
    starts, lengths = (np.array(each, np.int64) for each in zip(*drawn, strict=True))
    tables = np.arange(len(drawn) * 120).reshape(len(drawn), 120)
    found = tiled(Spans.of(starts, lengths, tables, 1), most).shape[1]
    assert found <= tiles_for(tokens_for(int(lengths.sum())), len(drawn) + others, most)


@given(st.integers(1, 40_000), st.integers(1, 300), st.sampled_from([1, 16, 128]), st.data())
def test_no_graph_is_for_more_tokens_than_there_is_room_for(
    most_tokens: int, spans: int, tile: int, data: st.DataObject
) -> None:
    """The engine of a small model ended at its start: it recorded graphs of up to 2,048 tokens, whatever a step had."""
    most = tokens_for(most_tokens)
    count = data.draw(st.integers(1, most_tokens))
    prepared = prepared_for(most)
    assert prepared == sorted(set(prepared))
    assert prepared[-1] == min(most, PREPARED)
    assert count > PREPARED or tokens_for(count) in prepared
    for size in (*prepared, tokens_for(count)):
        assert size <= most
        assert tiles_for(size, spans, tile) <= tiles_for(most, spans, tile)
        assert tokens_for(size) == size
    assert count <= tokens_for(count) <= max(64, 1.5 * count)


def test_graphs_are_of_few_sizes() -> None:
    assert len({tokens_for(count) for count in range(1, GRAPHED + 1)}) == 18, "docs/engine.md says so"
