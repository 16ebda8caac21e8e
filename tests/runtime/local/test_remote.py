"""The control plane's ports over sockets."""

import asyncio
from types import SimpleNamespace
from typing import Any

from staleflow.protocol import StalenessLedger
from staleflow.runtime.local.remote import RemoteInstance, RemoteTrainer
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Cell, Chunk, Costs, Fence, Finish, InstanceState, Report, Reset, TrajectoryNews


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


def test_tokens_that_die_with_an_instance_are_those_made_since_they_were_last_sent() -> None:
    def report(running: int, made: int, *sent: int) -> Report:
        news = [TrajectoryNews("p0/0", 1, ((0, each),), Chunk.of(0, [1] * each, [0.0] * each)) for each in sent]
        costs = Costs([Cell(False, 1, made, 0, 0, 1.0, 1.0)])
        state = InstanceState(version=0, running=running)
        return Report("i0", 1, Fence(1, 1, 1), state, progress=news, costs=costs)

    async def main() -> None:
        child: Any = SimpleNamespace(name="i0", send=None)
        port = RemoteInstance(child, 1)
        port.hear(report(4, 100, 60, 40))
        assert port.unseen() < 10, "only what it makes in the moment since"
        port.hear(report(4, 70, 20))
        assert 50 <= port.unseen() < 60
        port.busy_s = 0.0  # counted elsewhere
        assert port.unseen() == 50, "an instance without time has no rate"
        port.hear(report(0, 0))
        assert port.unseen() == 0

    asyncio.run(main())
