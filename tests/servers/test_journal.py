"""The journal's digest: the same for equal runs, another for any other run."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.servers.journal import Event, MemoryJournal

values = st.recursive(
    st.text(max_size=6) | st.integers() | st.floats(allow_nan=False) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
events = st.lists(st.tuples(st.sampled_from(["admit", "route", "commit"]), values, values), max_size=12)

repeatable = settings(derandomize=True, deadline=None)


def digest(written: list[Event], look_after: tuple[int, ...] = ()) -> str:
    journal = MemoryJournal(keep=False)
    for at, event in enumerate(written):
        journal.append(event)
        if at in look_after:
            journal.digest()
    return journal.digest()


def spelled(value: Any) -> Any:
    """An equal value that shares no object with the original, or with itself."""
    if isinstance(value, tuple):
        return tuple(spelled(each) for each in value)
    return "".join(list(value)) if isinstance(value, str) else copy.deepcopy(value)


@repeatable
@given(events)
def test_equal_runs_do_not_differ_because_they_share_other_objects(written: list[Event]) -> None:
    assert digest([spelled(event) for event in written]) == digest(written)
    doubled = [event for event in written for _ in range(2)]
    assert digest([spelled(event) for event in doubled]) == digest(doubled)


@repeatable
@given(events, st.sets(st.integers(0, 12)))
def test_looking_at_the_digest_does_not_change_it(written: list[Event], looks: set[int]) -> None:
    assert digest(written, tuple(looks)) == digest(written)


@repeatable
@given(events, events)
def test_different_runs_have_different_digests(one: list[Event], other: list[Event]) -> None:
    assert (digest(one) == digest(other)) == (repr(one) == repr(other))


@repeatable
@given(events.filter(len), st.integers(0, 11), st.integers(0, 11))
def test_no_event_and_no_order_is_overlooked(written: list[Event], at: int, to: int) -> None:
    at, to = at % len(written), to % len(written)
    swapped = list(written)
    swapped[at], swapped[to] = written[to], written[at]
    changed = [*written[:at], (*written[at], "more"), *written[at + 1 :]]
    merged = [*written[:at], (*written[at], *written[to]), *written[at + 1 :]]
    for other in (swapped, changed, merged, written[:-1], [*written, written[-1]]):
        assert (digest(other) == digest(written)) == (repr(other) == repr(written))


def test_a_run_longer_than_the_buffer_is_hashed_to_its_last_event() -> None:
    for count in (MemoryJournal.FLUSH - 1, MemoryJournal.FLUSH, 2 * MemoryJournal.FLUSH + 1):
        written: list[Event] = [("route", f"p{at}/0", at) for at in range(count)]
        assert digest(written) == digest(written, look_after=(0, 1, count // 2))
        assert digest(written) != digest(written[:-1])
        assert digest(written) != digest([("route", "p0/0", 1), *written[1:]])


@repeatable
@given(events)
def test_a_journal_that_keeps_nothing_counts_and_hashes_all_the_same(written: list[Event]) -> None:
    kept, dropped = MemoryJournal(), MemoryJournal(keep=False)
    for event in written:
        kept.append(event)
        dropped.append(event)
    assert kept.events == written
    assert dropped.events == []
    assert kept.position == dropped.position == len(written)
    assert kept.digest() == dropped.digest()
