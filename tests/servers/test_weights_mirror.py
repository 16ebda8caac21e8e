"""Weights on another machine than the trainer's: one whole copy of each version, whatever happens on the way."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow import tcp
from staleflow.servers.weights import BusyStoreError, mirror
from staleflow.servers.weights.mirror import MirroredWeights
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.serving import WeightService

SHAPES = {"large": (700, 500), "middle": (300, 10), "small": (3,), "empty": (0, 4)}


def tensors(version: int, frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for at, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(100 * at + (0 if name in frozen else version))
        made[name] = torch.randn(shape, generator=generator)
    return made


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in SHAPES)


class Machines:
    """The trainer's, and another one with as many who pull as are asked for."""

    def __init__(self, folder: Path) -> None:
        (here := folder / "trainer").mkdir()
        (folder / "other").mkdir()
        self._folder = folder
        self.address = folder / "weights.json"
        self.trainer = LocalParameterServer.create("run.a", registry=here)
        self.service = WeightService("127.0.0.1", "run.a", self.address, registry=here)
        self._pullers: list[MirroredWeights] = []

    def puller(self, wait_s: float = 20.0) -> MirroredWeights:
        self._pullers.append(MirroredWeights("run.b", self.address, wait_s, self._folder / "other"))
        return self._pullers[-1]

    def close(self) -> None:
        for each in self._pullers:
            each.close()
        self.service.close()
        self.trainer.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.close()


class Line:
    """A connection on which something happens to the n-th byte that comes."""

    def __init__(self, end: socket.socket, at: int, happens: Callable[[memoryview], int]) -> None:
        self._end = end
        self._left = at
        self._happens = happens

    def recv_into(self, into: memoryview) -> int:
        if not 0 <= self._left < len(into):
            came = self._end.recv_into(into)
            self._left -= came
            return came
        came = self._end.recv_into(into[: self._left + 1])
        self._left -= came
        return came if self._left >= 0 else self._happens(into[:came])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


def flips(came: memoryview) -> int:
    came[-1] ^= 0x40
    return len(came)


def ends(_came: memoryview) -> int:
    return 0


def test_the_first_who_pulls_fetches_and_the_others_map_it(machines: Machines) -> None:
    first, second = machines.puller(), machines.puller()
    for version in range(4):
        machines.trainer.push(version, tensors(version))
        for each in (first, second):
            assert each.pull(into := empty(), version) == version
            assert equal(into, tensors(version))
    assert first.fetched == 4 * sum(each.nbytes for each in tensors(0).values())
    assert second.fetched == 0


def test_only_what_changed_is_sent(machines: Machines) -> None:
    puller = machines.puller()
    for version in range(6):
        machines.trainer.push(version, tensors(version, frozen=("large",)))
        before = puller.fetched
        puller.pull(into := empty(), version)
        assert equal(into, tensors(version, frozen=("large",)))
        if version >= 2:  # both slots have it by then
            assert puller.fetched - before < tensors(0)["large"].nbytes


@settings(max_examples=25)
@given(at=st.integers(0, 1_500_000), happens=st.sampled_from([flips, ends]))
def test_a_torn_transfer_is_never_published(
    at: int, happens: Callable[[memoryview], int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    machines = Machines(tmp_path_factory.mktemp("torn"))
    lines = iter([lambda end: Line(end, at, happens)])

    def dial(address: tcp.Address) -> Any:
        return next(lines, lambda end: end)(tcp.dial(address))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "tcp", type("Tcp", (), {"dial": staticmethod(dial), "read": tcp.read}))
        puller, other = machines.puller(), machines.puller()
        machines.trainer.push(0, tensors(0))
        machines.trainer.push(1, tensors(1))
        assert puller.pull(into := empty(), 1) == 1
        assert equal(into, tensors(1))
        assert other.pull(into := empty(), 1) == 1
        assert equal(into, tensors(1))
    machines.close()


def test_who_dies_while_it_fetches_leaves_the_next_to_do_it(machines: Machines) -> None:
    machines.trainer.push(0, tensors(0))
    if not (pid := os.fork()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mirror, "fill", lambda *_: os._exit(9))
            machines.puller().pull(empty(), 0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    machines.puller().pull(into := empty(), 0)
    assert equal(into, tensors(0))


def test_a_version_that_does_not_come_is_waited_for_only_so_long(machines: Machines) -> None:
    machines.trainer.push(0, tensors(0))
    with pytest.raises(TimeoutError, match=r"version 1 did not come within 0.3 s .*older"):
        machines.puller(wait_s=0.3).pull(empty(), 1)
    machines.address.unlink()
    with pytest.raises(TimeoutError, match="nobody has said where the trainer is"):
        machines.puller(wait_s=0.3).pull(empty(), 1)


def test_an_older_version_is_pulled_while_the_trainer_is_away(machines: Machines) -> None:
    machines.trainer.push(3, tensors(3))
    machines.puller().pull(empty(), 3)
    machines.service.close()
    for at_least in (2, 0):
        machines.puller(wait_s=1.0).pull(into := empty(), at_least)
        assert equal(into, tensors(3))


def test_a_trainer_that_takes_over_waits_for_who_is_fetching(machines: Machines, tmp_path: Path) -> None:
    """It would have died of that, and the run with it."""
    machines.trainer.push(0, tensors(0))
    (puller := machines.puller()).pull(empty(), 0)
    fetching = LocalParameterServer.attach("run.b", registry=tmp_path / "other")
    assert fetching.take_up()
    with pytest.raises(BusyStoreError):
        LocalParameterServer.take_over("run.b", registry=tmp_path / "other", wait_s=0.1)
    threading.Timer(0.2, fetching.lay_down).start()
    with LocalParameterServer.take_over("run.b", registry=tmp_path / "other", wait_s=30.0) as trainer:
        assert trainer.newest() == 0
    puller.close()
    fetching.detach()


def test_a_trainer_on_another_machine_takes_over_where_the_copies_are(machines: Machines, tmp_path: Path) -> None:
    """Its versions continue after the one that the copy has."""
    machines.trainer.push(0, tensors(0))
    puller = machines.puller()
    puller.pull(empty(), 0)
    machines.service.close()
    with LocalParameterServer.take_over("run.b", registry=tmp_path / "other") as trainer:
        tcp.write(machines.address, tcp.Address("127.0.0.1", 1, "", "run.b"))
        trainer.push(1, tensors(1))
        assert puller.pull(into := empty(), 1) == 1
        assert equal(into, tensors(1))


def test_the_last_to_leave_takes_the_copy_away(machines: Machines, tmp_path: Path) -> None:
    machines.trainer.push(0, tensors(0))
    first, second = machines.puller(), machines.puller()
    for each in (first, second):
        each.pull(empty(), 0)
    first.close()
    assert list((tmp_path / "other").glob("*.weights"))
    second.close()
    assert not list((tmp_path / "other").glob("*.weights"))


def test_without_the_token_nothing_is_said(machines: Machines) -> None:
    machines.trainer.push(0, tensors(0))
    address = tcp.read(machines.address)
    assert address is not None
    assert machines.address.stat().st_mode & 0o077 == 0
    with tcp.dial(tcp.Address(address.host, address.port, "0" * tcp.TOKEN_BYTES)) as end:
        end.sendall(b"\xff" * 8)
        with pytest.MonkeyPatch.context():
            assert _rest(end) == b""


def _rest(end: socket.socket) -> bytes:
    try:
        return end.recv(1)
    except ConnectionResetError:
        return b""
