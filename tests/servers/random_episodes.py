"""A server of episodes that is used at random: turns, branches, ends and new beginnings, and reports that come late."""

from random import Random

import numpy as np

from staleflow.protocol import StalenessLedger
from staleflow.servers.book import branch_of, branches
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.journal import Journal
from staleflow.servers.payloads import Chunk, Limits, Payloads
from staleflow.types import GIVEN, Spans, episode_of, made_count, token_count
from tests.servers.random_server import Acts
from tests.servers.small_server import state_of

LIMITS = Limits(max_tokens=40, max_prompt_tokens=10_000, vocab_size=50_000, max_given=60)
Report = tuple[str, int, Spans, Chunk]


def new_server(journal: Journal) -> EpisodeServer:
    server = EpisodeServer(StalenessLedger(2, 1, 1), 2, 1, journal, Payloads(LIMITS))
    server.keeps_steps = True
    return server


class RandomEpisodes(Acts[EpisodeServer]):
    def __init__(self, server: EpisodeServer, random: Random) -> None:
        super().__init__(server, random)
        self.said: list[Report] = []
        """By instances, at any time."""
        self.trained: list[str] = []
        self._acts = (
            *(self.admit,) * 2,
            *(self.ask,) * 8,
            *(self.place,) * 8,
            *(self.report,) * 8,
            *(self.branch,) * 2,
            *(self.end,) * 4,
            self.again,
            self.interrupt,
            self.release,
            *(self.late,) * 3,
            *(self.train,) * 4,
        )

    def ask(self) -> None:
        one = self.pick("waiting")
        if one is None or made_count(one.spans) >= 36:
            return
        room = LIMITS.max_given - (one.generated - made_count(one.spans))
        tokens = [self.random.randrange(LIMITS.vocab_size) for _ in range(min(room, self.random.randrange(6)))]
        until = made_count(one.spans) + self.random.randrange(1, 5)
        offset = one.generated
        assert self.server.given(one.name, offset, tokens, until) is one
        if tokens:
            assert self.server.given(one.name, offset, tokens, until) is None  # asked again

    def place(self) -> None:
        if one := self.pick("queued"):
            newest = self.server.ledger.version
            self.server.place(one.name, self.random.choice(("i0", "i1")), max(0, newest - self.random.randrange(2)))

    def report(self) -> None:
        one = self.pick("running", "interrupted")
        if one is None:
            return
        until, made = branch_of(one).until, made_count(one.spans)
        version = max(self.server.ledger.version, max((version for version, _ in one.spans), default=0))
        more = self.random.randrange(until - made + 1)
        spans = one.spans
        if more:
            last = spans[-1][1] if spans and spans[-1][0] == version else 0
            spans = (*(spans[:-1] if last else spans), (version, last + more))
        start = self.random.randrange(one.generated + 1)
        known, ids = self.server.payloads, np.zeros(0, np.int32)
        assert known is not None
        ids = np.concatenate([known.tokens(one.name)[start:], self.random.choices(range(LIMITS.vocab_size), k=more)])
        chances = np.concatenate([known.logprobs(one.name)[start:], np.full(more, -0.5, np.float32)])
        said = one.name, one.epoch, spans, Chunk.of(start, ids, chances)
        self.said.append(said)
        call = self.random.choice((self.server.stream, self.server.give_back, self.turned, self.turned))
        call(*said)

    def turned(self, name: str, epoch: int, spans: Spans, chunk: Chunk) -> bool:
        return self.server.turned(name, epoch, spans, chunk, self.random.choice(("stop", "length")))

    def late(self) -> None:
        """A report of an earlier epoch, or of something that is gone, changes nothing."""
        if not self.said:
            return
        name, epoch, spans, chunk = self.random.choice(self.said)
        one = self.server.trajectories.get(name)
        if one is not None and one.epoch == epoch and one.state in ("queued", "running", "interrupted"):
            return
        before = state_of(self.server)
        call = self.random.choice((self.server.stream, self.server.give_back, self.turned))
        assert not call(name, epoch, spans, chunk)
        assert state_of(self.server) == before

    def branch(self) -> None:
        one = self.pick("waiting", "running")
        if one is not None and len(branches(one.group, episode_of(one.name))) < 4:
            shared = self.random.randrange(1, one.prompt_tokens + min(one.generated, LIMITS.max_given) + 1)
            new = self.server.branch(one.name, shared)
            held = self.held(one.name)[:shared]
            assert self.held(new.name) == held
            assert made_count(new.spans) == 0

    def held(self, name: str) -> list[int]:
        server = self.server
        one = server.trajectories[name]
        assert server.payloads is not None
        prompt = server.payloads.tokens(one.group.name)[: one.prompt_tokens]
        return [*prompt.tolist(), *server.payloads.tokens(name).tolist()]

    def episode(self) -> str | None:
        one = self.pick("waiting", "queued", "running", "interrupted")
        return None if one is None else episode_of(one.name)

    def end(self) -> None:
        name = self.episode()
        if name and self.random.random() < 0.5 and self.server.has_turns(name):
            self.server.ended(name, self.random.random(), self.random.random() < 0.2)

    def again(self) -> None:
        if name := self.episode():
            self.server.again(name, "the tool crashed")

    def interrupt(self) -> None:
        if one := self.pick("running"):
            self.server.interrupt(one.name)

    def release(self) -> None:
        one = self.pick("waiting", "queued", "running", "complete")
        if one and one.group.name not in self.server.leased and self.random.random() < 0.3:
            self.server.release(one.group, "no signal")

    def train(self) -> None:
        server, ledger = self.server, self.server.ledger
        if ledger.frontier > ledger.version:
            groups = [server.groups[name] for name in server.leased]
            for row in server.rows(groups):
                self.trained.append(row.name)
                assert row.tokens.size == row.logprobs.size == token_count(row.spans)
                assert all(ledger.version - version <= 1 for version, _ in row.spans if version != GIVEN)
                assert row.made
            server.commit(ledger.version)
        elif ledger.taken and self.random.random() < 0.1:
            server.rollback(ledger.version)
        elif ledger.ready():
            server.consume()
        else:
            server.take()
