"""Stores of the local parameter server: how they come and go, and what is refused without harm to what is there."""

import os
from pathlib import Path

import pytest
import torch

from staleflow.servers.weights import reclaim, segments, slots
from staleflow.servers.weights.parameter_server import ParameterServer
from staleflow.servers.weights.segments import StoreRegistry, WeightsError, attach_segment, create_segment
from tests.servers import weights_store
from tests.servers.weights_store import Server, Tensors, equal, filled, pulled, slots_of, words, zeros

registry = weights_store.registry


def test_reclaim_removes_the_dead_store_and_neither_of_two_live_ones(registry: Path) -> None:
    first, second = (Server.create(name, registry=registry) for name in ("first", "second"))
    dead = Server.create("dead", registry=registry)
    for server in (first, second, dead):
        server.push(0, filled(0))
    names = slots.segments_of((registry / "dead.weights").read_bytes()) or []
    assert len(names) == 2
    assert reclaim(registry) == []
    dead.detach()
    third = Server.create("third", registry=registry)
    assert all(attach_segment(name) is None for name in names)
    assert sorted(path.name for path in registry.glob("*.weights")) == [
        "first.weights",
        "second.weights",
        "third.weights",
    ]
    for server in (first, second):
        server.push(1, filled(1))
        assert equal(pulled(server, filled(0))[1], filled(1))
    for server in (first, second, third):
        server.close()
    assert [path.name for path in registry.iterdir()] == ["lock"]


def test_a_store_with_a_dead_writer_and_a_living_reader_is_not_reclaimed(registry: Path) -> None:
    writer = Server.create("w", registry=registry)
    writer.push(0, filled(0))
    reader = Server.attach("w", registry=registry)
    writer.detach()
    assert reclaim(registry) == []
    with pytest.raises(WeightsError, match=r"in use.*take it over"):
        Server.create("w", registry=registry)
    assert equal(pulled(reader, filled(0))[1], filled(0))
    reader.close()
    assert reclaim(registry) == ["w"]


def test_a_creator_that_died_early_leaves_nothing_that_blocks_the_next(registry: Path) -> None:
    (registry / "w.weights").write_bytes(b"")
    (registry / "x.weights").write_bytes(slots.ControlBlock.blank()[:100])
    with Server.create("w", registry=registry) as server:
        assert server.newest() == -1
    assert [path.name for path in registry.iterdir()] == ["lock"]


def test_a_closed_store_leaves_no_memory_and_readers_are_told(registry: Path) -> None:
    writer = Server.create("w", registry=registry)
    writer.push(0, filled(0))
    reader = Server.attach("w", registry=registry)
    names = [writer._store.block.segment(slot) for slot in slots_of(writer)]
    writer.close()
    writer.close()
    assert all(attach_segment(name) is None for name in names)
    for call in (reader.newest, lambda: reader.pull(zeros(filled(0)))):
        with pytest.raises(WeightsError, match="was closed by its writer"):
            call()
    with pytest.raises(WeightsError, match="is closed"):
        writer.push(1, filled(1))
    reader.close()
    with pytest.raises(WeightsError, match="is closed here: attach again"):
        reader.newest()


def test_a_new_writer_after_a_death_before_the_first_version_starts_afresh(registry: Path) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    writer = Server.create("w", registry=registry, between=die)
    with pytest.raises(KeyboardInterrupt):
        writer.push(0, filled(0))
    writer.detach()
    with Server.take_over("w", registry=registry) as writer:
        assert writer.newest() == -1
        writer.push(0, {"another": torch.ones(1000)})
        assert equal(pulled(writer, {"another": torch.ones(1000)})[1], {"another": torch.ones(1000)})


def test_it_is_used_as_any_parameter_server(registry: Path) -> None:
    local: ParameterServer = Server.create("w", registry=registry)
    local.push(0, filled(4))
    into = zeros(filled(0))
    assert (local.newest(), local.pull(into, 0)) == (0, 0)
    assert equal(into, filled(4))
    local.close()


# What is refused, and what stays


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**filled(1), "a": torch.ones(65)}, r"'a' has shape \(65,\) and is stored with shape \(64,\)"),
        ({**filled(1), "a": torch.ones(64, dtype=torch.int64)}, "'a' is torch.int64 and is stored as torch.float32"),
        (filled(1, "a", "b"), "'c' is missing"),
        (filled(1, "a", "b", "c", "d"), "'d' was not in the first push: start a new store"),
        ({**filled(1), "b": torch.ones(64).to_sparse()}, "'b' has no plain memory"),
        ({**filled(1), "b": torch.ones(64, device="meta")}, "'b' has no plain memory"),
    ],
)
def test_a_push_that_does_not_fit_is_refused_and_the_version_before_stays(
    registry: Path, tensors: Tensors, message: str
) -> None:
    with Server.create("w", registry=registry) as writer:
        writer.push(0, filled(0))
        with pytest.raises(WeightsError, match=message):
            writer.push(1, tensors)
        assert writer.newest() == 0
        assert equal(pulled(writer, filled(0))[1], filled(0))
        writer.push(1, {name: tensor.double() for name, tensor in filled(1).items()})  # floats are converted
        assert equal(pulled(writer, filled(0))[1], filled(1))


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({**filled(1), "a": torch.ones(65)}, r"'a' has shape \(65,\).*build the engine and the trainer"),
        ({**filled(1), "a": torch.ones(64, dtype=torch.int32)}, "'a' is torch.int32 and is stored as torch.float32"),
        (filled(1, "a", "b"), "'c' of the weights is missing"),
        (filled(1, "a", "b", "c", "d"), "'d' is not among the weights"),
        ({**filled(1), "a": torch.ones(1).expand(64)}, "'a' is expanded"),
    ],
)
def test_a_pull_that_does_not_fit_is_refused_before_anything_is_written(
    registry: Path, into: Tensors, message: str
) -> None:
    before = {name: tensor.clone() for name, tensor in into.items()}
    with Server.create("w", registry=registry) as writer:
        writer.push(0, filled(0))
        with pytest.raises(WeightsError, match=message):
            writer.pull(into)
        assert equal(into, before)


def test_versions_only_grow_and_the_future_cannot_be_pulled(registry: Path) -> None:
    with Server.create("w", registry=registry) as writer, Server.attach("w", registry=registry) as reader:
        assert reader.newest() == -1
        with pytest.raises(WeightsError, match="version 0 is not published, the newest is -1"):
            reader.pull(zeros(filled(0)))
        with pytest.raises(WeightsError, match="version -1 cannot be pushed"):
            writer.push(-1, filled(0))
        writer.push(5, filled(5))
        for version in (5, 4):
            with pytest.raises(WeightsError, match=f"version {version} cannot be pushed after version 5.*push 6"):
                writer.push(version, filled(0))
        with pytest.raises(WeightsError, match="version 6 is not published, the newest is 5"):
            reader.pull(zeros(filled(0)), 6)
        assert equal(pulled(reader, filled(0), at_least=5)[1], filled(5))
        with pytest.raises(WeightsError, match="attached for reading: push from its writer"):
            reader.push(6, filled(6))
        with pytest.raises(WeightsError, match="has a living writer"):
            Server.take_over("w", registry=registry)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "nothing to push"),
        ({"__metadata__": torch.ones(1)}, "rename it"),
        ({"a": torch.ones(1, dtype=torch.cdouble)}, "convert it"),
    ],
)
def test_a_first_push_that_cannot_be_stored_is_refused(registry: Path, tensors: Tensors, message: str) -> None:
    with Server.create("w", registry=registry) as writer:
        with pytest.raises(WeightsError, match=message):
            writer.push(0, tensors)
        assert writer.push(0, filled(0)).version == 0


def test_a_store_of_another_format_is_refused_and_left_alone(registry: Path) -> None:
    block = bytearray(slots.ControlBlock.blank())
    block[8] = 99
    (registry / "w.weights").write_bytes(block)
    for call in (Server.attach, Server.take_over):
        with pytest.raises(WeightsError, match="format 99 and this program reads 1"):
            call("w", registry=registry)
    assert reclaim(registry) == []
    (registry / "x.weights").write_bytes(bytes(len(block)))
    with pytest.raises(WeightsError, match="not a weights store: remove it"):
        Server.attach("x", registry=registry)


def test_a_full_machine_is_an_error_and_nothing_is_left(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server.create("w", registry=registry) as writer:
        with pytest.raises(WeightsError, match=r"not enough shared memory.*enlarge it"):
            writer.push(0, {"a": torch.ones(1).expand(2**45)})  # 128 TiB, of which nothing is touched
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WeightsError, match="not enough shared memory"):
            writer.push(0, filled(0))
        monkeypatch.undo()
        assert slots_of(writer) == []
        assert all(attach_segment(name) is None for name in slots.segments_of(words(writer).tobytes()) or [])
        writer.push(0, filled(0))


def full(_fd: int, _offset: int, _size: int) -> None:
    raise OSError(28, "No space left on device")


def test_the_second_slot_failing_frees_the_first(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([os.posix_fallocate, full])
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: next(calls)(*arguments))
    with Server.create("w", registry=registry) as writer:
        with pytest.raises(WeightsError, match="not enough shared memory"):
            writer.push(0, filled(0))
        assert writer.newest() == -1
        assert all(attach_segment(name) is None for name in slots.segments_of(words(writer).tobytes()) or [])


def test_names_and_folders_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightsError, match="cannot name a weights store"):
        Server.create("a/b", registry=tmp_path)
    with pytest.raises(WeightsError, match=r"no weights store 'w'.*create it first"):
        Server.attach("w", registry=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="pass another one as registry"):
        StoreRegistry(tmp_path / "file" / "folder")
    with pytest.raises(WeightsError, match="max_slots is 9: use 2 to 8"):
        Server.create("w", registry=tmp_path, max_slots=9)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(WeightsError, match="belongs to user"):
        StoreRegistry(tmp_path)


def test_a_registry_lock_that_is_never_released_is_reported(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LOCK_WAIT_S", 0.01)
    with StoreRegistry(registry).locked(), pytest.raises(WeightsError, match=r"has been held for 0.01 s"):
        Server.create("w", registry=registry)


def test_a_reader_too_many_is_refused_and_a_closed_one_makes_room(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "LEASES", 2)
    writer = Server.create("w", registry=registry)
    readers = [Server.attach("w", registry=registry) for _ in range(2)]
    with pytest.raises(WeightsError, match="2 readers are attached already"):
        Server.attach("w", registry=registry)
    readers.pop().close()
    readers.append(Server.attach("w", registry=registry))
    words(writer)[slots.FIRST_LEASE] = 2**22 + 1  # its process is dead
    Server.attach("w", registry=registry).close()
    writer.close()


def test_a_segment_is_never_made_over_another(registry: Path) -> None:
    name = f"/sf-test-{os.getpid()}"
    create_segment(name, 100)
    try:
        with pytest.raises(FileExistsError):
            create_segment(name, 100)
    finally:
        segments.unlink_segment(name)
    assert registry
