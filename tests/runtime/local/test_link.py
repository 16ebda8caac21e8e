"""The two ends of a socket."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.frames import Frames, framed
from staleflow.runtime.local.link import AWAY_S, LastingLink, SocketLink
from staleflow.types import Finish, FromProcess, Hello, Kept, Pushed, Reset, Setup, Stop, ToProcess
from staleflow.workers.link import Gone


def test_messages_behind_the_one_that_was_taken_are_not_lost() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        link = SocketLink(theirs, ToProcess)
        ours.sendall(framed(Reset()) + framed(Finish(3)) + framed(Stop()))
        assert next(iter(link.receive(10.0))) == Reset()
        assert list(link.receive(10.0)) == [Finish(3), Stop()]
        assert list(link.receive(0.0)) == []


def test_the_end_of_a_connection_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    link = SocketLink(theirs, ToProcess)
    ours.close()
    with pytest.raises(Gone):
        list(link.receive(10.0))
    with pytest.raises(Gone):
        link.send(Stop())


class Listener:
    """A control plane that comes and goes, at one address."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s"
        self.server: socket.socket | None = None
        self.end: socket.socket | None = None
        self.heard: list[Any] = []
        self.frames = Frames(FromProcess)

    def come(self) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.path.unlink(missing_ok=True)
        self.server.bind(str(self.path))
        self.server.listen()
        self.server.setblocking(False)

    def go(self) -> None:
        for each in (self.end, self.server):
            if each is not None:
                each.close()
        self.end = self.server = None

    def look(self) -> list[Any]:
        """What has come since the last look."""
        if self.end is None and self.server is not None:
            try:
                self.end, _ = self.server.accept()
            except BlockingIOError:
                return []
            self.end.setblocking(False)
            self.frames = Frames(FromProcess)
        try:
            return self.frames.feed(self.end.recv(1 << 20)) if self.end is not None else []
        except BlockingIOError:
            return []

    def say(self, message: Any) -> None:
        assert self.end is not None
        self.end.sendall(framed(message))


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    found = Listener(tmp_path)
    yield found
    found.go()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def link_to(listener: Listener) -> tuple[LastingLink, Clock]:
    clock = Clock()
    return LastingLink(str(listener.path), "i0", 3, clock=clock, sleep=clock.sleep), clock


acts = st.lists(st.sampled_from(["say", "say", "say", "keep", "die", "die unheard"]), max_size=30)


@settings(deadline=None, max_examples=60)
@given(acts)
def test_what_a_dead_control_plane_may_not_have_written_down_is_said_again_and_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str]
) -> None:
    """``durable`` is what control planes have written down: with the numbers they count, it is every message, once."""
    listener = Listener(tmp_path_factory.mktemp("link"))
    listener.come()
    link, clock = link_to(listener)
    said, durable, heard, number = 0, list[int](), list[int](), 0

    def turn() -> None:
        nonlocal heard, number
        list(link.receive(0.0))
        for message in listener.look():
            if isinstance(message, Hello):
                number = message.first - 1
                assert number <= len(durable), "something is missing"
            else:
                number += 1
                if number > len(durable) + len(heard):
                    heard.append(message.version)

    turn()
    for act in acts:
        match act:
            case "say":
                said += 1
                link.send(Pushed(said))
                turn()
            case "keep":
                durable, heard = durable + heard, []
                listener.say(Kept(len(durable)))
                turn()
            case _:
                if act == "die unheard":
                    said += 1
                    link.send(Pushed(said))
                listener.go()
                heard = []  # it had not written it down
                list(link.receive(0.0))
                said += 1
                link.send(Pushed(said))
                listener.come()
                clock.now += 1
                turn()
    assert durable + heard == list(range(1, said + 1))
    listener.go()


def test_a_process_works_on_without_a_control_plane_and_ends_if_none_comes_back(listener: Listener) -> None:
    """It was left behind for as long as it had work, or ended at once and lost what it held."""
    listener.come()
    link, clock = link_to(listener)
    list(link.receive(0.0))
    assert listener.look() == [Hello("i0", 3, os.getpid(), set_up=False, first=1)]
    listener.go()
    began = clock.now
    assert list(link.receive(0.0)) == [], "there is work to do: it does not wait"
    link.send(Pushed(1))
    with pytest.raises(Gone):
        list(link.receive(None))
    assert AWAY_S <= clock.now - began <= AWAY_S + 1


def test_the_next_control_plane_knows_whether_the_process_was_set_up(listener: Listener) -> None:
    listener.come()
    link, _ = link_to(listener)
    list(link.receive(0.0))
    listener.look()
    listener.say(Setup("trainer", "trainer", 3, "run", "model", "store", [0], 1, 0))
    assert [type(each) for each in link.receive(1.0)] == [Setup]
    listener.go()
    listener.come()
    list(link.receive(1.0))
    assert listener.look() == [Hello("i0", 3, os.getpid(), set_up=True, first=1)]


def test_what_came_before_the_end_of_a_connection_is_taken_first(listener: Listener) -> None:
    """Otherwise a step that the dead control plane had asked for might be made after the next one was told that it was
    not."""
    listener.come()
    link, _ = link_to(listener)
    list(link.receive(0.0))
    listener.look()
    listener.say(Finish(7))
    listener.go()
    link.send(Pushed(1))
    assert list(link.receive(1.0)) == [Finish(7)]
