"""The two ends of a socket."""

import socket

import pytest

from staleflow.runtime.local.link import SocketLink, pack
from staleflow.types import Finish, Reset, Stop, ToProcess
from staleflow.workers.link import Gone


def test_messages_behind_the_one_that_was_taken_are_not_lost() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        link = SocketLink(theirs, ToProcess)
        ours.sendall(pack(Reset()) + pack(Finish(3)) + pack(Stop()))
        assert next(iter(link.receive(10.0))) == Reset()
        assert list(link.receive(10.0)) == [Finish(3), Stop()]
        assert list(link.receive(0.0)) == []


def test_the_end_of_the_control_plane_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    link = SocketLink(theirs, ToProcess)
    ours.close()
    with pytest.raises(Gone):
        list(link.receive(10.0))
    with pytest.raises(Gone):
        link.send(Stop())
