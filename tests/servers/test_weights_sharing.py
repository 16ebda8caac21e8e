"""Weights that spread from node to node: who sends to whom, and who was sent to somebody that is dead."""

import socket
import threading
from collections.abc import Iterator
from math import ceil, log2
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.servers.weights.mirror import MirroredWeights
from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.servers.weights.serving import WeightService
from staleflow.servers.weights.sharing import MOST_SENDING, OWN, Place, Sharing
from tests.servers.test_weights_mirror import empty, equal, tensors

# Who sends to whom


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 12))
def test_nobody_sends_to_more_than_it_may_or_waits_while_somebody_is_free(
    chance: Random, most: int, clients: int
) -> None:
    sharing, version = Sharing(most), 0
    sends = dict[int, Place]()
    has = dict[int, tuple[int, Place]]()
    for _ in range(200):
        client = chance.randrange(clients)
        what = chance.choice(["ask", "ask", "has", "lost", "left", "push"])
        if what == "push":
            version += 1
        elif what == "ask":
            sends.pop(client, None)
            busy = {place: list(sends.values()).count(place) for place in set(sends.values())}
            able = {place for name, (held, place) in has.items() if held >= version and name != client} | {OWN}
            place = sharing.ask(client, version)
            assert (place is None) == all(busy.get(each, 0) >= most for each in able)
            if place is not None:
                assert place in able
                assert busy.get(place, 0) < most
                sends[client] = place
        elif what == "has" and client in sends:
            del sends[client]
            has[client] = version, (f"node {client}", 1)
            sharing.has(client, *has[client])
        elif what == "lost" and client in sends:
            failed = sends.pop(client)
            has = {name: held for name, held in has.items() if held[1] != failed}
            sharing.lost(client)
        elif what == "left":
            sends.pop(client, None)
            has.pop(client, None)
            sharing.left(client)
        there = {OWN} | {place for _, place in has.values()}
        sends = {name: place for name, place in sends.items() if place in there}  # it has failed, or left


@given(st.integers(1, 2_000))
def test_the_time_until_all_nodes_have_a_version_grows_with_the_logarithm_of_their_number(nodes: int) -> None:
    sharing, rounds, left = Sharing(), 0, list(range(nodes))
    while left:
        given = [(client, place) for client in left if (place := sharing.ask(client, 1)) is not None]
        for client, _ in given:
            sharing.has(client, 1, (f"node {client}", 1))
        left = left[len(given) :]
        rounds += 1
    assert rounds <= 1 + ceil(log2(nodes + 1) / log2(1 + MOST_SENDING))


# Over connections


class Machines:
    """The trainer's and others, whose copies are apart."""

    def __init__(self, folder: Path) -> None:
        (folder / "trainer").mkdir()
        self._folder = folder
        self.address = folder / "weights.json"
        self.trainer = LocalParameterServer.create("run.t", registry=folder / "trainer")
        self.service = WeightService("127.0.0.1", "run.t", self.address, registry=folder / "trainer")
        self.others: list[MirroredWeights] = []

    def other(self) -> MirroredWeights:
        name = f"run.{len(self.others)}"
        (registry := self._folder / name).mkdir()
        self.others.append(MirroredWeights(name, self.address, 20.0, registry))
        return self.others[-1]

    def busy(self) -> None:
        """The trainer's node sends to as many as it may, from now on."""
        sharing, changed = self.service._sharing, self.service._changed
        assert sharing is not None
        with changed:
            for at in range(MOST_SENDING):  # as soon as what was said before has been heard
                assert changed.wait_for(lambda at=at: sharing.ask(f"somebody {at}", 10**9) == OWN, 20)

    def close(self) -> None:
        for each in self.others:
            each.close()
        self.service.close()
        self.trainer.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.close()


def test_who_has_a_version_gives_it_to_the_next_while_the_trainers_node_is_busy(machines: Machines) -> None:
    machines.trainer.push(3, tensors(3))
    machines.other().pull(empty(), 3)
    machines.busy()
    sent = machines.service.sent
    for _ in range(4):
        assert machines.other().pull(into := empty(), 3) == 3
        assert equal(into, tensors(3))
    assert machines.service.sent == sent, "from the trainer's node nothing more was sent"


def test_many_nodes_at_a_time_all_get_each_version(machines: Machines) -> None:
    others = [machines.other() for _ in range(9)]
    got: list[tuple[int, dict[str, torch.Tensor]]] = []
    for version in range(3):
        machines.trainer.push(version, tensors(version))

        def pull(each: MirroredWeights, version: int = version) -> None:
            into = empty()
            got.append((each.pull(into, version), into))

        pulling = [threading.Thread(target=pull, args=(each,)) for each in others]
        for each in pulling:
            each.start()
        for each in pulling:
            each.join()
    assert len(got) == 27
    assert all(equal(into, tensors(version)) for version, into in got)


def test_a_node_that_died_since_it_got_the_version_is_not_waited_for(machines: Machines) -> None:
    machines.trainer.push(0, tensors(0))
    first, second = machines.other(), machines.other()
    for each in (first, second):
        each.pull(empty(), 0)
    machines.busy()
    assert first._service is not None
    first._service.close()  # it does not say so to the trainer's
    assert machines.other().pull(into := empty(), 0) == 0
    assert equal(into, tensors(0))


def test_a_node_that_gives_torn_bytes_is_not_asked_again(machines: Machines) -> None:
    """And nothing of them is published."""
    machines.trainer.push(0, tensors(0))
    first, second = machines.other(), machines.other()
    for each in (first, second):
        each.pull(empty(), 0)
    machines.busy()
    assert first._service is not None
    asked: list[int] = []

    def torn(end: socket.socket, *_: object) -> None:
        asked.append(1)
        end.sendall(b"\x00" * 64)
        raise EOFError

    first._service._send = torn  # type: ignore[method-assign]
    for _ in range(2):
        assert machines.other().pull(into := empty(), 0) == 0
        assert equal(into, tensors(0))
    assert asked == [1]


def test_nothing_of_a_copy_stays_on_a_node_that_was_sending_it_when_it_left(machines: Machines, tmp_path: Path) -> None:
    machines.trainer.push(0, tensors(0))
    first = machines.other()
    first.pull(empty(), 0)
    machines.busy()
    second = machines.other()
    second.pull(empty(), 0)
    first.close()
    assert not list((tmp_path / "run.0").glob("*.weights"))
    assert second.pull(into := empty(), 0) == 0
    assert equal(into, tensors(0))
