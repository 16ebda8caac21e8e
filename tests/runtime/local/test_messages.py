"""Bytes come in pieces of any size; messages come out whole, in order, and as the types they were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.frames import Frames, framed
from staleflow.types import (
    Cell,
    Chunk,
    Costs,
    Drop,
    Failed,
    Feed,
    Fence,
    Finish,
    FromProcess,
    InstanceState,
    PullWeights,
    Pushed,
    Report,
    Row,
    Stop,
    Submit,
    ToProcess,
    TrajectoryNews,
    Work,
)

ints = st.integers(0, 2**31)
names = st.text(max_size=12)
spans = st.lists(st.tuples(ints, ints), max_size=3).map(tuple)
fences = st.builds(Fence, ints, ints, ints)
work = st.builds(Work, names, ints, names, ints, spans, st.binary(), st.binary(), st.binary())
rows = st.builds(Row, names, st.binary(), st.binary(), st.binary(), spans, st.floats(allow_nan=False))
to_process = st.one_of(
    st.builds(Submit, fences, st.lists(work, max_size=3)),
    st.builds(Drop, fences, st.lists(st.tuples(names, ints), max_size=3)),
    st.builds(PullWeights, fences, ints),
    st.builds(Feed, ints, st.lists(st.lists(rows, max_size=2), max_size=2)),
    st.builds(Finish, ints),
    st.just(Stop()),
)
chunks = st.builds(Chunk, ints, st.binary(), st.binary())
news = st.builds(TrajectoryNews, names, ints, spans, st.none() | chunks)
seconds = st.floats(0, 9)
states = st.builds(
    InstanceState, st.integers(-1, 9), *([ints] * 6), st.integers(-1, 9), st.none() | st.tuples(ints, ints, seconds)
)
cells = st.builds(Cell, st.booleans(), ints, ints, ints, ints, seconds, seconds)
costs = st.builds(Costs, st.lists(cells, max_size=2), ints, seconds, ints, seconds)
failed = st.just([Failed("t", 1, "why")])
told = st.lists(news, max_size=2)
from_process = st.one_of(
    st.builds(Report, names, ints, fences, states, told, told, told, failed, st.none() | ints, costs),
    st.builds(Pushed, ints),
)


@given(st.lists(to_process, max_size=6), st.data())
def test_messages_survive_any_cut_of_the_stream(messages: list, data: st.DataObject) -> None:
    _cut_anywhere(messages, ToProcess, data)


@given(st.lists(from_process, max_size=6), st.data())
def test_news_survive_any_cut_of_the_stream(messages: list, data: st.DataObject) -> None:
    _cut_anywhere(messages, FromProcess, data)


def _cut_anywhere(messages: list, kinds: object, data: st.DataObject) -> None:
    stream = b"".join(framed(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames = Frames(kinds)
    got = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += frames.feed(stream[begin:end])
    assert got == messages


def test_a_damaged_stream_is_refused_before_memory_is_taken_for_it() -> None:
    with pytest.raises(ValueError, match="damaged"):
        Frames(ToProcess).feed(b"\xff\xff\xff\xff")
