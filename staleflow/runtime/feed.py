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
        self.holds = False
        """Whether nothing is handed over for now."""
        self._down = False
        self._over = False

    def end(self) -> None:
        """The run has made its last version: nothing is handed over any more, however much is complete."""
        self._over = True

    def push_on(self) -> None:
        """Hand over whatever can go now."""
        ledger = self._server.ledger
        if self.holds or self._down or self._over or ledger.frontier > ledger.version:
            return
        step = ledger.frontier
        if self._consume == "stream" and (groups := self._server.take()):
            self._trainer.feed(step, groups)
        if ledger.frontier == step and ledger.ready():
            groups, running = self._server.consume()
            self._trainer.feed(step, groups)
            self._drop(running)
        if ledger.frontier > step:
            self._trainer.finish(step)

    def pushed(self, version: int) -> bool:
        """``version`` is durable. Whether that was news."""
        ledger = self._server.ledger
        if version != ledger.version + 1 or ledger.frontier != version:
            return False
        self._server.note("push", version)
        self._server.commit(ledger.version)
        return True

    def lost(self) -> bool:
        """The trainer died. Whether a version had become durable that nobody had told us of."""
        self._down = True
        return self._settle()

    def back(self) -> bool:
        """A trainer is there again, at the newest durable version, with nothing fed. Answers as ``lost`` does."""
        self._down = False
        news = self._settle()
        self._trainer.reset()  # what it was fed before, if anything, is fed again
        return news

    def recover(self) -> bool:
        """After a restart of the control plane: the trainer may have finished a step, or hold half of one."""
        news = self._settle()
        self._trainer.reset()
        return news

    def _settle(self) -> bool:
        ledger = self._server.ledger
        if self.pushed(self._trainer.durable()):
            return True
        if ledger.taken:
            self._server.rollback(ledger.version)
        return False
