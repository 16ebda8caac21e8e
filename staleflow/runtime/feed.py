"""The trainer's feed: which groups go to the open step, and when a step is committed, rolled back or tried again.

``stream`` hands complete groups over as soon as the ledger lets them go; ``batch`` waits until the whole step is ready.
A step is committed when its version is durable, and not before: a trainer that dies earlier gets the same groups again,
one that dies later is not asked again.
"""

from collections.abc import Callable

from staleflow.coordinator.strategies import Consume
from staleflow.runtime.ports import TrainerPort
from staleflow.servers.lifecycle import Trajectory
from staleflow.servers.trajectories import TrajectoryServer


class TrainerFeed:
    def __init__(
        self,
        server: TrajectoryServer,
        trainer: TrainerPort,
        consume: Consume,
        drop: Callable[[list[Trajectory]], None],
    ) -> None:
        self._server = server
        self._trainer = trainer
        self._consume = consume
        self._drop = drop
        self._over = False
        self.away = False
        """Whether nobody is there to be fed."""

    def end(self) -> None:
        """The run has made its last version: nothing is handed over any more, however much is complete."""
        self._over = True

    def push_on(self) -> None:
        """Hand over whatever can go now. What is said may be answered at once, by a call of this method: the ledger is
        done with before."""
        ledger = self._server.ledger
        if self.away or self._over or ledger.frontier > ledger.version:
            return
        step, running = ledger.frontier, list[Trajectory]()
        groups = self._server.take() if self._consume == "stream" else []
        if ledger.frontier == step and ledger.ready():
            rest, running = self._server.consume()
            groups += rest
        full = ledger.frontier > step
        if groups:
            self._trainer.feed(step, groups)
        if full:
            self._trainer.finish(step)
        self._drop(running)

    def pushed(self, version: int) -> bool:
        """``version`` is durable. Whether that was news."""
        ledger = self._server.ledger
        if version != ledger.version + 1 or ledger.frontier != version:
            return False
        self._server.note("push", version)
        self._server.commit(ledger.version)
        return True

    def lost(self) -> bool:
        """The trainer died: its step is rolled back, unless a version had become durable that was not announced.
        Whether one had."""
        self.away = True
        news = self.pushed(self._trainer.durable())
        if self._server.ledger.taken:
            self._server.rollback(self._server.ledger.version)
        return news

    def back(self) -> bool:
        """A trainer is there, at the newest durable version, with nothing fed. Answers as ``lost`` does. A step that
        is full is made of the same groups: there may be tokens of its version already."""
        self.away = False
        ledger = self._server.ledger
        news = self.pushed(self._trainer.durable())
        full = ledger.frontier > ledger.version
        if ledger.taken and not full:
            self._server.rollback(ledger.version)
        self._trainer.reset()  # what it was fed before, if anything, is fed again
        if full:
            self._trainer.feed(ledger.version, [self._server.groups[name] for name in self._server.leased])
            self._trainer.finish(ledger.version)
        return news
