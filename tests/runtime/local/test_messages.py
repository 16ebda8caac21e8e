"""Bytes come in pieces of any size; messages come out whole, in order, and as the types they were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.runtime.local.link import pack, unpacker
from staleflow.types import (
    Abort,
    Cell,
    Costs,
    Feed,
    Finish,
    FromProcess,
    Job,
    Load,
    News,
    Pull,
    Pushed,
    Stop,
    Submit,
    Told,
    ToProcess,
    TrainGroup,
    TrainRow,
)

ints = st.integers(0, 2**31)
names = st.text(max_size=12)
spans = st.lists(st.tuples(ints, ints), max_size=3).map(tuple)
fences = st.tuples(ints, ints, ints)
jobs = st.builds(Job, names, ints, names, st.binary(), st.binary(), st.binary(), spans)
rows = st.builds(TrainRow, names, st.binary(), st.binary(), spans, st.floats(allow_nan=False))
to_process = st.one_of(
    st.builds(Submit, fences, st.lists(jobs, max_size=3)),
    st.builds(Abort, fences, st.lists(st.tuples(names, ints), max_size=3)),
    st.builds(Pull, fences, ints),
    st.builds(Feed, ints, st.lists(st.builds(TrainGroup, st.binary(), st.lists(rows, max_size=2)), max_size=2)),
    st.builds(Finish, ints),
    st.just(Stop()),
)
told = st.builds(Told, names, ints, spans, ints, st.binary(), st.binary())
loads = st.builds(
    Load,
    fences,
    st.integers(-1, 9),
    *([ints] * 6),
    st.none() | st.tuples(ints, ints, st.floats(0, 9)),
    ints,
    st.floats(0, 9),
)
seconds = st.floats(0, 9)
cells = st.builds(Cell, st.booleans(), ints, ints, ints, ints, seconds, seconds)
costs = st.builds(Costs, st.lists(cells, max_size=2), ints, seconds, ints, seconds)
failed = st.just([("t", 1, "why")])
from_process = st.one_of(
    st.builds(News, loads, *([st.lists(told, max_size=2)] * 3), failed, st.none() | ints, costs),
    st.builds(Pushed, ints),
)


@given(st.lists(to_process, max_size=6), st.data())
def test_messages_survive_any_cut_of_the_stream(messages: list, data: st.DataObject) -> None:
    _cut_anywhere(messages, ToProcess, data)


@given(st.lists(from_process, max_size=6), st.data())
def test_news_survive_any_cut_of_the_stream(messages: list, data: st.DataObject) -> None:
    _cut_anywhere(messages, FromProcess, data)


def _cut_anywhere(messages: list, kinds: object, data: st.DataObject) -> None:
    stream = b"".join(pack(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames = unpacker(kinds)
    got = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += frames.feed(stream[begin:end])
    assert got == messages


def test_a_damaged_stream_is_refused_before_memory_is_taken_for_it() -> None:
    with pytest.raises(ValueError, match="damaged"):
        unpacker(ToProcess).feed(b"\xff\xff\xff\xff")
