"""The control plane's ports over sockets."""

import asyncio
from types import SimpleNamespace
from typing import Any

from staleflow.protocol import StalenessLedger
from staleflow.runtime.local.remote import RemoteTrainer
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Finish, Reset


def test_a_trainer_that_takes_over_is_not_told_the_rest_of_a_step_whose_beginning_it_never_heard() -> None:
    """It trained on the last group of a step alone, if that was sent while it was starting."""
    sent: list[Any] = []
    child = SimpleNamespace(ready=asyncio.Event(), send=sent.append)
    crew: Any = SimpleNamespace(children={"trainer": child})
    server = TrajectoryServer(StalenessLedger(1, 0), 1, 0, MemoryJournal())
    trainer = RemoteTrainer(crew, server, version=3)
    trainer.feed(3, [])
    trainer.finish(3)
    assert sent == []
    child.ready.set()
    trainer.reset()
    trainer.finish(3)
    assert sent == [Reset(), Finish(3)]
