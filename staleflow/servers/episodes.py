"""The trajectory server where environments play: members are episodes, and an episode has turns and branches.

Between two turns a trajectory *waits*: its environment has the ball. What the environment says is an event like any
other, written with its tokens before anybody acts on it::

    each = server.given("p7/3", offset=0, tokens=[5, 6], until=64)     # asks for a turn; it is queued
    server.turned("p7/3", each.epoch, spans, chunk, "stop")            # an instance made it; it waits again
    server.branch("p7/3", shared=40)                                   # "p7/3~1" begins with these tokens
    server.ended("p7/3", reward=1.0)                                   # all its branches are scored
    server.again("p7/3", "the tool crashed")                           # or it begins anew, and what it had is waste

An instance knows nothing of this: a turn is a trajectory that is resumed, with more tokens than it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from staleflow.servers.book import branch_of, branches
from staleflow.servers.journal import Event
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.trajectories import ON_AN_INSTANCE, UNFINISHED, TrajectoryServer
from staleflow.types import LOGPROB, TOKEN, Chunk, Row, Spans, Work, episode_of, made_count


class EpisodeServer(TrajectoryServer):
    plays = True

    def _admission(self, prompt: int, attempt: int, prompt_tokens: int) -> Event:
        return "admit", prompt, attempt, prompt_tokens, True

    def given(self, name: str, offset: int, tokens: Sequence[int] | int, until: int) -> Trajectory | None:
        """Ask for a turn that begins with these tokens (only their count where there is no payload) behind the first
        ``offset``, and ends with ``until`` made tokens at most. None if that was asked before; whoever asks for
        something else, or while another turn is open, gets a ``ValueError``."""
        each = self.trajectories[name]
        count = tokens if isinstance(tokens, int) else len(tokens)
        if offset < each.generated:
            self._check_same(each, offset, tokens, count)
            return None
        if offset > each.generated or each.state != "waiting":
            raise ValueError(
                f"trajectory {name} is {each.state} with {each.generated} tokens: no turn begins at {offset}"
            )
        kept = None
        if self.payloads is not None and not isinstance(tokens, int) and count:
            ids = np.asarray(tokens, TOKEN).tobytes()
            chunk = Chunk(offset, ids, bytes(count * LOGPROB.itemsize))
            given = offset - made_count(each.spans) + count
            self.payloads.checked(name, offset, offset + count, chunk, given)
            kept = name, chunk
        self._record(("given", name, count, until), kept)
        return each

    def turned(self, name: str, epoch: int, spans: Spans, chunk: Chunk | None, reason: str) -> bool:
        """The model's turn ended, with all these tokens."""
        each = self._current(name, epoch, UNFINISHED)
        if each is None or not each.generated + len(spans):
            return False
        news = self._checked(each, spans, chunk)
        if news is None:
            self.give_back(name, epoch, each.spans)
            return False
        self._record(("turn", name, spans, reason), *news)
        return True

    def branch(self, parent: str, shared: int) -> Trajectory:
        """A new branch that begins with the first ``shared`` tokens of another one, its prompt included."""
        origin = self.trajectories[parent]
        if not 0 < shared <= origin.prompt_tokens + origin.generated:
            raise ValueError(f"{parent} has no {shared} tokens to begin a branch with: share from 1 to all that it has")
        first = self.trajectories[episode_of(parent)]
        name = f"{first.name}~{branch_of(first).opened + 1}"
        kept = None
        if self.payloads is not None and (taken := shared - min(shared, origin.prompt_tokens)):
            tokens, _ = self.payloads.bytes_of(parent)
            kept = name, Chunk(0, tokens[: taken * TOKEN.itemsize], bytes(taken * LOGPROB.itemsize))
        self._record(("branch", parent, shared), kept)
        return self.trajectories[name]

    def ended(
        self, name: str, reward: float, masked: bool = False
    ) -> tuple[list[Trajectory], tuple[Group, list[Trajectory]] | None]:
        """The environment has ended the episode. Returns branches that still run, and what ``score`` would."""
        group = self.trajectories[name].group
        running = [each for each in branches(group, name) if each.state in ON_AN_INSTANCE]
        self._record(("ended", name, reward, masked))
        return running, self.occupy(group)

    def has_turns(self, name: str) -> bool:
        """Whether the model has made any token of the episode."""
        return any(made_count(each.spans) for each in branches(self.trajectories[name].group, name))

    def again(self, name: str, why: str) -> list[Trajectory]:
        """The episode begins anew. Returns branches that still run."""
        running = [each for each in branches(self.trajectories[name].group, name) if each.state in ON_AN_INSTANCE]
        self._record(("again", name, why))
        return running

    def work(self, trajectory: Trajectory) -> Work:
        name, group, payloads = trajectory.name, trajectory.group, self.payloads
        size, limit = trajectory.prompt_tokens, branch_of(trajectory).until
        whole = size == group.prompt_tokens
        work = name, trajectory.epoch, group.name if whole else name, size, trajectory.spans
        if payloads is None:
            return Work(*work, limit=limit)
        prompt = payloads.bytes_of(group.name)[0][: size * TOKEN.itemsize]
        tokens, logprobs = payloads.bytes_of(name) if trajectory.generated else (b"", b"")
        return Work(*work, prompt, tokens, logprobs, limit)

    def rows(self, groups: Iterable[Group]) -> list[Row]:
        """Branches of an episode follow each other."""
        payloads = self.payloads
        if payloads is None:
            raise ValueError("this server keeps no payload: give it one to train on")
        return [
            Row(
                each.name,
                payloads.bytes_of(group.name)[0][: each.prompt_tokens * TOKEN.itemsize],
                *payloads.bytes_of(each.name),
                each.spans,
                each.reward or 0.0,
                episode_of(each.name),
                branch_of(each).masked,
            )
            for group in groups
            for each in by_episode(group)
            if each.state == "complete"
        ]

    def _check_same(self, each: Trajectory, offset: int, tokens: Sequence[int] | int, count: int) -> None:
        """What is asked for again must be what was asked for."""
        if self.payloads is None or isinstance(tokens, int):
            return
        known = self.payloads.tokens(each.name)[offset : offset + count]
        if known.tolist() != list(tokens):
            raise ValueError(
                f"trajectory {each.name} has other tokens than those that are given again from {offset} on"
            )


def by_episode(group: Group) -> list[Trajectory]:
    """The branches of each episode behind each other, in the order of the episodes."""
    first = {each.name: at for at, each in enumerate(group.members)}
    return sorted(group.members, key=lambda each: first.get(episode_of(each.name), 0))
