"""A trajectory server with payload that is used at random, for the tests of its journal."""

import hashlib
import zlib
from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

import numpy as np

from staleflow.protocol import StalenessLedger
from staleflow.servers.journal import Journal
from staleflow.servers.lifecycle import Trajectory
from staleflow.servers.payloads import Chunk, Limits, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Spans, token_count
from tests.servers.small_server import Source, state_of

LIMITS = Limits(max_tokens=40, max_prompt_tokens=10_000, vocab_size=50_000)
SOURCE = Source(first=3)
Server = TypeVar("Server", bound=TrajectoryServer)


def new_server(journal: Journal, limits: Limits = LIMITS) -> TrajectoryServer:
    server = TrajectoryServer(StalenessLedger(2, 1, 1), 2, 1, journal, Payloads(limits))
    server.keeps_steps = True
    return server


def content(name: str, start: int, end: int) -> Chunk:
    """The tokens of a trajectory depend on nothing but its name."""
    at = np.arange(start, end)
    return Chunk.of(start, (zlib.crc32(name.encode()) + at) % LIMITS.vocab_size, -(at % 7 + 1) / 8)


def image(server: TrajectoryServer) -> str:
    """A hash of all that the server knows, payload included."""
    payloads = server.payloads
    assert payloads is not None
    held = [
        (each.name, payloads.tokens(each.name).tobytes(), payloads.logprobs(each.name).tobytes())
        for each in sorted(server, key=lambda each: each.name)
        if each.state != "aborted"
    ]
    prompts = [payloads.bytes_of(name)[0] for name in server.groups]
    state = state_of(server)
    state |= {"trajectories": sorted(state["trajectories"], key=lambda each: each[0]), "fresh": sorted(state["fresh"])}
    whole = repr((state, held, prompts, payloads.bytes, payloads.claimed, server.made))
    return hashlib.blake2b(whole.encode(), digest_size=12).hexdigest()


class Acts(Generic[Server]):
    """What may happen to a server, one thing after the other."""

    _acts: tuple[Callable[[], object], ...]
    """What to choose from; likelier things several times."""

    def __init__(self, server: Server, random: Random) -> None:
        self.server = server
        self.random = random

    def act(self) -> None:
        self.random.choice(self._acts)()

    def pick(self, *states: str) -> Trajectory | None:
        fitting = [one for one in self.server if one.state in states]
        return self.random.choice(fitting) if fitting else None

    def admit(self) -> None:
        if self.server.fresh < 3:
            self.server.admit(SOURCE)


class RandomActs(Acts[TrajectoryServer]):
    def __init__(self, server: TrajectoryServer, random: Random) -> None:
        super().__init__(server, random)
        self._acts = (
            *(self.admit,) * 2,
            *(self.place,) * 6,
            *(self.report,) * 8,
            *(self.score,) * 5,
            self.interrupt,
            self.release,
            *(self.train,) * 4,
            self.forget,
        )

    def place(self) -> None:
        if one := self.pick("queued"):
            newest = self.server.ledger.version
            self.server.place(one.name, self.random.choice(("i0", "i1")), max(0, newest - self.random.randrange(2)))

    def report(self) -> None:
        if one := self.pick("running", "interrupted"):
            version = max(self.server.ledger.version, one.spans[-1][0] if one.spans else 0)
            more = self.random.randrange(12)
            spans: Spans = (*one.spans, (version, more)) if more else one.spans
            total = min(token_count(spans), LIMITS.max_tokens)
            if total < token_count(spans):
                return
            start = self.random.randrange(one.generated + 1)
            chunk = content(one.name, start, total)
            call = self.random.choice((self.server.stream, self.server.generated, self.server.give_back))
            call(one.name, one.epoch, spans, chunk)

    def score(self) -> None:
        if one := self.pick("generated"):
            self.server.score(one.name, self.random.random())

    def interrupt(self) -> None:
        if one := self.pick("running"):
            self.server.interrupt(one.name)

    def release(self) -> None:
        one = self.pick("queued", "running", "complete")
        if one and one.group.name not in self.server.leased and self.random.random() < 0.3:
            self.server.release(one.group, "no signal")

    def forget(self) -> None:
        """As a checkpoint does, of one of the versions since the last."""
        if self.random.random() < 0.2:
            self.server.forget(self.server.ledger.version - self.random.randrange(3))

    def train(self) -> None:
        ledger = self.server.ledger
        if ledger.frontier > ledger.version:
            self.server.commit(ledger.version)
        elif ledger.taken and self.random.random() < 0.1:
            self.server.rollback(ledger.version)
        elif ledger.ready():
            self.server.consume()
        else:
            self.server.take()
