"""A whole tree, in one process and deterministic, cut after every n-th event of its journal and continued.

The trainer of the tree is a chain: what each step was fed. Cut and continued, from where the trainer was (shared
memory) or from its last checkpoint and the journal, the chain is that of a tree that was never cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from staleflow.coordinator.strategies import Consume
from staleflow.protocol import StalenessLedger
from staleflow.runtime.feed import TrainerFeed
from staleflow.servers.durable import DurableJournal
from staleflow.servers.journal import Event
from staleflow.servers.lifecycle import Group
from staleflow.servers.made import rows_of
from staleflow.servers.payloads import Payloads
from staleflow.servers.state import recover
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Chunk, Row
from tests.servers.random_server import LIMITS, SOURCE, content

STEPS, GROUPS, MEMBERS, EVERY = 7, 2, 2, 3


class CutError(Exception):
    """The tree is dead."""


class Cut(DurableJournal):
    """Kills the tree that appends this event. What was not committed is lost."""

    last = 10**9

    def append(self, event: Event, kept: tuple[str, Chunk] | None = None, dropped: Sequence[str] = ()) -> None:
        if self.position >= self.last:
            self._queue.clear()
            raise CutError
        super().append(event, kept, dropped)


@dataclass
class Chain:
    """``TrainerPort``: a trainer that does nothing but remember."""

    server: TrajectoryServer
    steps: list[list[Row]] = field(default_factory=list[list[Row]])
    fed: list[Row] = field(default_factory=list[Row])
    full: bool = False

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        assert step == len(self.steps)
        self.fed += self.server.rows(groups)

    def finish(self, step: int) -> None:
        assert step == len(self.steps)
        self.full = True

    def reset(self) -> None:
        self.fed, self.full = [], False

    def make(self) -> None:
        self.steps.append(sorted(self.fed, key=lambda row: row.name))
        self.reset()

    def durable(self) -> int:
        return len(self.steps)


class Tree:
    def __init__(self, path: Path, bound: int, consume: Consume, random: Random) -> None:
        self.journal = Cut(path, threaded=False, snapshot_events=50)
        self.random = random
        ledger = StalenessLedger(GROUPS, bound)
        self.server = TrajectoryServer(ledger, MEMBERS, 0, self.journal, Payloads(LIMITS))
        self.server.keeps_steps = True
        recover(self.server, self.journal)
        self.trainer = Chain(self.server)
        self.feed = TrainerFeed(self.server, self.trainer, consume, lambda _: None)

    def resume(self, steps: list[list[Row]]) -> None:
        """With a trainer that has these."""
        server = self.server
        self.trainer.steps = list(steps)
        for step in range(len(steps), server.ledger.version):
            self.trainer.fed = [row for group in rows_of(server.made[step], self.journal) for row in group]
            self.trainer.make()
        for each in list(server):
            if each.state in ("running", "interrupted"):
                server.give_back(each.name, each.epoch, each.spans)
        self.feed.back()
        self.feed.push_on()

    def run(self) -> None:
        """Until the last step, or until it is cut."""
        server, random = self.server, self.random
        while server.ledger.version < STEPS:
            while server.fresh < server.ledger.room(server.ledger.version):
                server.admit(SOURCE)
            for each in random.sample(list(server), len(server.trajectories)):
                self.move(each.name)
            if random.random() < 0.3:
                self.journal.commit()
            self.feed.push_on()
            if self.trainer.full:
                self.journal.commit()  # the end of a step waits for the journal
                self.trainer.make()
                self.feed.pushed(self.trainer.durable())
                if (version := server.ledger.version) % EVERY == 0:
                    self.journal.commit()
                    server.forget(version)

    def move(self, name: str) -> None:
        """One thing happens to a trajectory. Its tokens depend on nothing but its name."""
        server, one = self.server, self.server.trajectories.get(name)
        if one is None:
            return
        if one.state == "queued":
            server.place(name, "i0", server.ledger.version)
        elif one.state == "running":
            length, version = 3 + one.group.prompt % 7 + len(name) % 5, server.ledger.version
            more = min(self.random.randrange(1, 6), length - one.generated)
            if not more:
                server.generated(name, one.epoch, one.spans)
                return
            before, same = one.spans, 0
            if before and before[-1][0] == version:
                before, same = before[:-1], before[-1][1]
            news = content(name, one.generated, one.generated + more)
            server.stream(name, one.epoch, (*before, (version, same + more)), news)
        elif one.state == "generated":
            server.score(name, len(name) / 8)


def whole(path: Path, bound: int, consume: Consume, seed: int) -> tuple[list[list[Row]], int]:
    tree = Tree(path, bound, consume, Random(seed))
    tree.run()
    return tree.trainer.steps, tree.journal.position


@pytest.mark.parametrize("memory", [True, False], ids=["from shared memory", "from a checkpoint"])
@pytest.mark.parametrize(("bound", "consume"), [(0, "stream"), (0, "batch"), (2, "stream")])
def test_a_tree_that_is_cut_at_any_event_continues_as_if_it_had_not_been(
    tmp_path: Path, bound: int, consume: Consume, memory: bool
) -> None:
    expected, events = whole(tmp_path / "whole" / "events.db", bound, consume, 1)
    assert len(expected) == STEPS
    for cut in range(5, events, 41):
        path, random = tmp_path / f"cut-{cut}" / "events.db", Random(1)
        trees = 0
        tree = Tree(path, bound, consume, random)
        tree.journal.last = cut
        while True:
            trees += 1
            try:
                tree.run()
                break
            except CutError:
                steps = tree.trainer.steps
                tree.journal.close()
                tree = Tree(path, bound, consume, random)
                version = tree.server.ledger.version
                assert version <= len(steps) <= tree.server.ledger.frontier, "no version of what was forgotten"
                tree.resume(steps if memory else steps[: version - version % EVERY])
                assert tree.trainer.steps[:version] == steps[:version], "made again of the same rows"
                tree.journal.last = tree.journal.position + cut if trees < 4 else 10**9
        made = tree.trainer.steps
        names = [row.name for step in made for row in step]
        assert len(names) == len(set(names)) == STEPS * GROUPS * MEMBERS
        if bound == 0:
            assert made == expected
        assert all(
            step - version <= bound for step, rows in enumerate(made) for row in rows for version, _ in row.spans
        )
        assert [len(rows) for rows in made] == [GROUPS * MEMBERS] * STEPS
        tree.journal.close()
