"""What a dead trainer left in shared memory is used only if all of it is there, and as it was written."""

from pathlib import Path

import pytest
import torch

from staleflow.config import load
from staleflow.run.directory import RunDirectory
from staleflow.run.shared import left_behind
from staleflow.servers.weights import standby_of
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.segments import attach_segment
from staleflow.training.fed import note_of


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(load(None, [f"runs={tmp_path}"]), "test")


def stores(run: RunDirectory, registry: Path, newest: int, kept: int) -> list[LocalParameterServer]:
    """Weights at one version, and the state of a trainer at another."""
    found = [LocalParameterServer.create(name, registry=registry) for name in (run.store, standby_of(run.store))]
    for store, version in zip(found, (newest, kept), strict=True):
        store.push(version, {"a": torch.arange(5.0) + version, "b": torch.ones(3, 2)})
    for step in range(kept, newest):
        note_of(run.path, step).write_bytes(b"")
    return found


@pytest.mark.parametrize(("newest", "kept"), [(4, 4), (4, 2)])
def test_a_whole_one_is_found_and_a_damaged_or_incomplete_one_is_not(
    run: RunDirectory, tmp_path: Path, newest: int, kept: int
) -> None:
    registry = tmp_path / "registry"
    assert left_behind(run, registry, wait_s=0) == -1, "there is none"
    found = stores(run, registry, newest, kept)
    assert left_behind(run, registry, wait_s=0) == -1, "somebody writes to it"
    for store in found:
        store.detach()
    assert left_behind(run, registry, wait_s=0) == newest
    for step in range(kept, newest):
        note_of(run.path, step).rename(moved := run.path / "moved")
        assert left_behind(run, registry, wait_s=0) == -1, "what a step was fed is missing"
        moved.rename(note_of(run.path, step))
    for name in (run.store, standby_of(run.store)):
        flip(name, registry)
        assert left_behind(run, registry, wait_s=0) == -1, "a byte has changed"
        flip(name, registry)
    assert left_behind(run, registry, wait_s=0) == newest
    for name in (run.store, standby_of(run.store)):
        LocalParameterServer.take_over(name, registry=registry).close()


def flip(name: str, registry: Path) -> None:
    """A bit of the last tensor."""
    reader = LocalParameterServer.attach(name, registry=registry)
    block = reader._store.block
    memory = attach_segment(block.segment(block.published.slot))
    assert memory is not None
    memory[-1] ^= 1
    reader.close()
