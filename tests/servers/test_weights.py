"""Versions through the local parameter server: what is pulled is what was pushed, whatever happens in between."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.servers.weights import segments, slots
from staleflow.servers.weights.pulling import ATTEMPTS
from staleflow.servers.weights.segments import WeightsError, attach_segment
from staleflow.servers.weights.tensors import DTYPES
from tests.servers import weights_store
from tests.servers.weights_store import Clock, Server, World, equal, filled, pulled, slots_of, words, zeros

registry = weights_store.registry

# Any sequence of events

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
MODELS = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=6)
SEEDS = st.integers(0, 7)  # few, so that tensors often stay as they were
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), SEEDS),
        st.tuples(st.just("pull"), st.integers(0, 2)),
        st.tuples(st.just("overtaken"), st.integers(0, 2), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("stall"), st.integers(0, 2)),
        st.tuples(st.just("expire"), st.just(0)),
        st.tuples(st.just("die"), st.integers(1, 6), SEEDS),
        st.tuples(st.just("rejoin"), st.integers(0, 2)),
    ),
    max_size=25,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(model=MODELS, events=EVENTS, max_slots=st.integers(2, 4))
def test_whatever_happens_a_pull_gives_one_version_as_it_was_pushed(
    tmp_path_factory: pytest.TempPathFactory, model: Any, events: list[Any], max_slots: int
) -> None:
    world = World(str(tmp_path_factory.mktemp("registry")), model, max_slots)
    try:
        for name, *arguments in events:
            getattr(world, name)(*arguments)
        for number in range(3):
            world.pull(number)
    finally:
        for server in (*world.readers, world.writer):
            server.close()


# Readers that are overtaken


def overtake(registry: Path, pushes: int, max_slots: int) -> tuple[Server, Server]:
    """A store at version 0 and a reader in whose first pull, after one of three tensors, this many pushes happen."""
    writer = Server.create("w", registry=registry, max_slots=max_slots)
    writer.push(0, filled(0))
    calls = iter(range(10**6))

    def hook() -> None:
        if next(calls) == 0:
            for _ in range(pushes):
                version = writer.newest() + 1
                writer.push(version, filled(version))

    return writer, Server.attach("w", registry=registry, between=hook)


def test_a_reader_whose_slot_is_taken_starts_over_and_never_mixes_versions(registry: Path) -> None:
    writer, reader = overtake(registry, pushes=2, max_slots=2)
    version, into = pulled(reader, filled(0))
    assert (version, equal(into, filled(2))) == (2, True)
    assert reader.last_pull
    assert reader.last_pull.attempts == 2
    writer.close()


def test_a_reader_that_is_overtaken_but_leased_finishes_what_it_began(registry: Path) -> None:
    writer, reader = overtake(registry, pushes=2, max_slots=3)
    version, into = pulled(reader, filled(0))
    assert (version, equal(into, filled(0))) == (0, True)
    assert len(slots_of(writer)) == 3
    writer.close()


def test_a_reader_that_is_overtaken_for_ever_gets_an_error_and_not_a_mix(registry: Path) -> None:
    writer = Server.create("w", registry=registry, max_slots=2)
    writer.push(0, filled(0))

    def hook() -> None:
        for _ in range(2):
            writer.push(writer.newest() + 1, filled(writer.newest() + 1))

    reader = Server.attach("w", registry=registry, between=hook)
    with pytest.raises(WeightsError, match=f"overwritten {ATTEMPTS} times.*pull again"):
        reader.pull(zeros(filled(0)))
    reader._reader._between = None  # type: ignore[union-attr]
    newest = writer.newest()
    version, into = pulled(reader, filled(0))
    assert (version, equal(into, filled(newest))) == (newest, True)
    writer.close()


@pytest.mark.parametrize(("pushes", "seen"), [(0, [0]), (1, [0]), (2, [0, 2]), (3, [0, 3])])
def test_what_is_lent_is_read_again_if_its_slot_was_taken(registry: Path, pushes: int, seen: list[int]) -> None:
    writer = Server.create("w", registry=registry, max_slots=2)
    writer.push(0, filled(0))
    reader = Server.attach("w", registry=registry)
    read: dict[int, set[float]] = {}

    def use(version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        values = [tensor.clone() for _, tensor in tensors]
        for later in range(1, pushes + 1) if version == 0 else ():
            writer.push(later, filled(later))
        read[version] = {value for each in values for value in each.tolist()}

    assert reader.lend(use) == seen[-1]
    assert list(read) == seen
    assert read[seen[-1]] == {float(seen[-1])}
    with pytest.raises(WeightsError, match="version 9 is not published"):
        reader.lend(use, 9)
    reader.close()
    writer.close()


def test_a_slot_that_was_rewritten_before_the_lease_is_not_taken_for_the_older_version(registry: Path) -> None:
    writer = Server.create("w", registry=registry, max_slots=2)
    writer.push(0, filled(0))
    clock = Clock()

    def late() -> int:
        """Asked for the time of the lease, after the newest version was looked up."""
        if writer.newest() == 0:
            writer.push(1, filled(1))
            writer.push(2, filled(2))
        return clock()

    reader = Server.attach("w", registry=registry, clock=late)
    version, into = pulled(reader, filled(0))
    assert (version, equal(into, filled(2))) == (2, True)
    writer.close()


def test_what_a_broken_off_attempt_copied_or_not_is_not_taken_for_what_is_held(registry: Path) -> None:
    """The attempt writes a = 1, then b = 5 from a slot that was taken. The newest version is a = 0, as was held
    before, and b = 1, as the attempt should have brought."""
    writer = Server.create("w", registry=registry, max_slots=2)
    writer.push(0, filled(0))
    versions = iter([filled(5), filled(5), {**filled(1), "a": filled(0)["a"]}])

    def hook() -> None:
        if reader.last_pull:
            for tensors in versions:
                writer.push(writer.newest() + 1, tensors)

    reader = Server.attach("w", registry=registry, between=hook)
    into = zeros(filled(0))
    reader.pull(into)
    writer.push(1, filled(1))
    assert reader.pull(into) == 4
    assert equal(into, {**filled(1), "a": filled(0)["a"]})
    writer.close()


def test_a_version_that_is_complete_but_not_published_is_not_pulled(registry: Path) -> None:
    """The writer died between its last two stores; the next one makes another version of that number."""
    writer = Server.create("w", registry=registry)
    writer.push(0, filled(0))
    block = writer._store.block
    block.publish = lambda *_: None  # type: ignore[method-assign]
    writer.push(1, filled(1))
    reader = Server.attach("w", registry=registry)
    assert pulled(reader, filled(0))[0] == 0
    writer.detach()
    writer = Server.take_over("w", registry=registry)
    writer.push(1, filled(7))
    assert equal(pulled(reader, filled(0))[1], filled(7))
    writer.close()


def test_a_push_that_broke_off_does_not_count_as_what_the_slot_holds(registry: Path) -> None:
    """Later pushes skip what a slot holds already: after a failure in the middle that is not known."""
    calls = iter(range(1000))
    fail_at = [7]

    def hook() -> None:
        if next(calls) == fail_at[0]:
            raise KeyboardInterrupt

    writer = Server.create("w", registry=registry, between=hook)
    writer.push(0, filled(0))
    writer.push(1, filled(1))
    with pytest.raises(KeyboardInterrupt):
        writer.push(2, filled(2))  # into the slot of version 0, of which one tensor is left
    assert equal(pulled(writer, filled(0))[1], filled(1))
    writer.push(2, filled(0))
    assert equal(pulled(writer, filled(0), verify=True)[1], filled(0))
    writer.close()


# Leases and slots


def lease(reader: Server, slot: int, seconds: float = 10) -> None:
    assert reader._reader
    reader._store.block.lease(reader._reader._entry, slot, seconds)


def test_the_writer_avoids_leased_slots_grows_to_its_limit_then_takes_the_oldest(registry: Path) -> None:
    writer = Server.create("w", registry=registry, max_slots=4)
    readers = [Server.attach("w", registry=registry) for _ in range(4)]
    held: list[int] = []
    for version in range(4):
        writer.push(version, filled(version))
        held.append(writer._store.block.published.slot)
        lease(readers[version], held[-1])
    assert sorted(held) == [0, 1, 2, 3]
    writer.push(4, filled(4))
    assert writer._store.block.published.slot == held[0]
    assert len(slots_of(writer)) == 4
    writer.close()


@pytest.mark.parametrize("reason", ["expired", "dead", "pid used again", "released"])
def test_a_lease_that_holds_no_longer_costs_no_slot(registry: Path, reason: str) -> None:
    clock = Clock()
    writer = Server.create("w", registry=registry, clock=clock)
    reader = Server.attach("w", registry=registry, clock=clock)
    writer.push(0, filled(0))
    lease(reader, writer._store.block.published.slot)
    assert writer._store.block.leased() == {0}
    if reason == "expired":
        clock.pass_(10.1)
    elif reason == "dead":
        words(writer)[slots.FIRST_LEASE] = 2**22 + 1  # above the largest pid there is
    elif reason == "pid used again":
        words(writer)[slots.FIRST_LEASE + 1] += 1
    else:
        reader.close()
    for version in (1, 2, 3):
        assert writer.push(version, filled(version)).slots == 2
    writer.close()


def test_slots_beyond_two_are_given_back_when_nobody_needs_them(registry: Path) -> None:
    writer = Server.create("w", registry=registry)
    readers = [Server.attach("w", registry=registry) for _ in range(3)]
    names: set[str] = set()
    for version in range(3):
        writer.push(version, filled(version))
        lease(readers[version], writer._store.block.published.slot)
    assert writer.push(3, filled(3)).slots == 4
    names = {writer._store.block.segment(slot) for slot in range(4)}
    into = zeros(filled(0))
    for reader in readers:
        reader.pull(into)
        assert reader._reader
        assert len(reader._reader._mapped) == 1
    for version in range(4, 9):
        writer.push(version, filled(version))
        readers[0].pull(into)
        assert equal(into, filled(version))
    assert len(slots_of(writer)) == 2
    assert sum(attach_segment(name) is not None for name in names) == 2
    assert readers[0]._reader
    assert len(readers[0]._reader._mapped) <= 2  # what was given back is unmapped here too
    writer.close()


def test_no_memory_for_a_spare_slot_takes_a_leased_one_instead(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = Server.create("w", registry=registry), None
    writer.push(0, filled(0))
    reader = Server.attach("w", registry=registry)
    lease(reader, 0)
    monkeypatch.setattr(segments, "ensure_room", lambda size: (_ for _ in ()).throw(segments.no_room(size, 0)))
    assert writer.push(1, filled(1)).slots == 2
    assert writer.push(2, filled(2)).slots == 2
    assert equal(pulled(reader, filled(0))[1], filled(2))
    writer.close()


def test_a_reader_renews_its_lease_while_it_copies(registry: Path) -> None:
    clock = Clock()
    writer = Server.create("w", registry=registry, clock=clock, max_slots=4)
    wide = {f"t{number}": torch.full((3 * 2**18,), 1.0) for number in range(6)}  # large enough for a renewal each
    writer.push(0, wide)
    version = iter(range(1, 100))

    def slow() -> None:
        clock.pass_(6)
        writer.push(next(version), wide)

    reader = Server.attach("w", registry=registry, clock=clock, between=slow)
    assert pulled(reader, wide)[0] == 0
    writer.close()
