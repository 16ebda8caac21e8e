"""Processes that push and pull weights are killed at any instruction. Nobody reads torn weights, the next writer goes
on, and nothing is left behind."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staleflow.servers.weights import reclaim, segments, slots
from staleflow.servers.weights.parameter_server import LocalParameterServer
from tests.servers.weights_processes import (
    NAME,
    Child,
    filled,
    fork_and_wait,
    pull_for_ever,
    push_for_ever,
    torn,
    zeros,
)

pytestmark = pytest.mark.processes

LONGEST_LIFE_S = 0.012


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.glob("*.weights"):
        for name in slots.segments_of(path.read_bytes()) or []:
            segments.unlink_segment(name)


def live_a_while(chance: random.Random) -> None:
    """Where in its work the child is when it is killed is left to chance; nothing waits for a condition here."""
    time.sleep(chance.random() * LONGEST_LIFE_S)


def being_written(server: LocalParameterServer) -> bool:
    return any(server._store.block.sequence(slot) & 1 for slot in server._store.block.allocated())


def no_complaint(reports: list[Any]) -> None:
    assert not [report for report in reports if isinstance(report, str)], reports


def kill_writers(registry: Path, kills: int) -> None:
    chance = random.Random(1)
    child = Child(push_for_ever, registry, True)
    reader, into, interrupted, last = None, zeros(), 0, -1
    for _ in range(kills):
        started = child.hear()
        assert started > last
        live_a_while(chance)
        child.kill()
        reader = reader or LocalParameterServer.attach(NAME, registry=registry)
        interrupted += being_written(reader)
        last = reader.pull(into, started, verify=True)
        assert torn(last, into) is None
        child = Child(push_for_ever, registry, False)
    child.hear()
    child.kill()
    assert interrupted, "none was killed in the middle of a push: the test means nothing"
    with LocalParameterServer.take_over(NAME, registry=registry) as writer:
        version = writer.newest() + 1
        writer.push(version, filled(version))
        assert reader
        assert (reader.pull(into), torn(version, into)) == (version, None)
        names = [writer._store.block.segment(slot) for slot in range(slots.SLOTS)]
        reader.close()
    assert all(segments.attach_segment(name) is None for name in names)
    assert [path.name for path in registry.iterdir()] == ["lock"]


def kill_readers(registry: Path, kills: int) -> None:
    """Three readers at a time while a writer pushes; the writer too is replaced now and then."""
    chance = random.Random(2)
    writer = Child(push_for_ever, registry, True)
    writer.hear()
    readers = [Child(pull_for_ever, registry) for _ in range(3)]
    for count in range(kills):
        victim = readers.pop(0)
        no_complaint([victim.hear()])
        live_a_while(chance)
        no_complaint(victim.kill())
        if count % 4 == 3:
            writer.kill()
            writer = Child(push_for_ever, registry, False)
            writer.hear()
        readers.append(Child(pull_for_ever, registry))
    for reader in readers:
        no_complaint([reader.hear()])
        reader.pipe.send("stop")
        kind, pulls = reader.hear()
        assert (kind, pulls > 0) == ("pulls", True)
        reader.process.join()
    writer.kill()
    server = LocalParameterServer.take_over(NAME, registry=registry)
    assert server._store.block.leased() == set()  # the dead hold nothing
    names = [server._store.block.segment(slot) for slot in range(slots.SLOTS)]
    server.detach()
    assert reclaim(registry) == [NAME]
    assert all(segments.attach_segment(name) is None for name in names)


def test_a_writer_killed_anywhere_leaves_the_newest_version_whole(registry: Path) -> None:
    kill_writers(registry, 20)


def test_readers_killed_anywhere_neither_stop_the_writer_nor_tear_what_others_read(registry: Path) -> None:
    kill_readers(registry, 16)


@pytest.mark.slow
def test_200_killed_writers(registry: Path) -> None:
    kill_writers(registry, 200)


@pytest.mark.slow
def test_150_killed_readers(registry: Path) -> None:
    kill_readers(registry, 150)


def test_a_killed_run_is_reclaimed_by_the_next_one_and_a_live_one_is_not(registry: Path) -> None:
    child = Child(push_for_ever, registry, True)
    child.hear()
    live = LocalParameterServer.create("live", registry=registry)
    live.push(0, filled(3))
    assert reclaim(registry) == []
    names = slots.segments_of((registry / f"{NAME}.weights").read_bytes()) or []
    child.kill()
    with LocalParameterServer.create("next", registry=registry):
        assert not (registry / f"{NAME}.weights").exists()
        assert all(segments.attach_segment(name) is None for name in names)
        into = zeros()
        live.pull(into)
        assert torn(3, into) is None
    live.close()


def test_a_forked_child_does_not_keep_its_dead_parent_alive(registry: Path) -> None:
    child = Child(fork_and_wait, registry)
    kind, error = child.hear()
    assert kind == "child"
    assert "belongs to the process that forked" in error
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.join()
    with LocalParameterServer.take_over(NAME, registry=registry) as writer:  # refused if the forked one held the lock
        writer.push(1, filled(1))
    child.pipe.close()  # lets the forked one end
