"""Episodes as the control plane plays them: what environments ask for, hear and say, on one side; turns on the other.

    episodes = Episodes(server, Environments(pool, problem_of), control)
    episodes.begin(group)                                   # a group was admitted: its members are played
    turn = await episodes.turn("p7/3", at, given, limit=0)  # the endpoint asks; a turn may last for long
    episodes.outcome("p7/3", attempt, scored(1.0))          # the pool says how it ended

An environment hears of nothing before it is in the journal. So an environment that has to begin again (its process or
the control plane died) is *replayed*: as long as it says what it said before, it gets the answers that it got before,
and nothing is sampled twice. Once it says something else, the episode begins anew and what it had is waste.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from staleflow.agents.outcome import Outcome
from staleflow.agents.turns import EnvironmentPort, EpisodeOverError, Turn
from staleflow.runtime.fleet import Member
from staleflow.runtime.homes import Homes
from staleflow.servers.book import branch_of, branches
from staleflow.servers.episodes import EpisodeServer
from staleflow.servers.lifecycle import Group, Trajectory
from staleflow.servers.payloads import BadReportError
from staleflow.tasks.task import Problem
from staleflow.types import Spans, TrajectoryNews, episode_of, made_count

NO_LIMIT = 2**53
WITHOUT_A_TURN = "it ended without a turn of the model"
REPLAY_DIFFERS = "its replay differs"


def at_once(call: Callable[..., None], *values: Any) -> None:
    call(*values)


@dataclass(frozen=True, slots=True)
class Environments:
    """Who plays, and how."""

    port: EnvironmentPort
    problem: Callable[[int], Problem]
    """Of each prompt."""
    tries: int = 3
    """Failures of an episode until its group is given up."""
    masks_truncated: bool = True
    """Whether tokens of an episode that was cut off are not trained."""
    hold: Callable[..., None] = at_once
    """Calls its first argument with the others, when all that was written before is durable."""


class Control(Protocol):
    """What the control plane does with what comes of an episode."""

    def drop(self, trajectories: list[Trajectory]) -> None: ...
    def give_up(self, group: Group, why: str, again: bool) -> None: ...
    def finished(self, longest: Trajectory, completed: tuple[Group, list[Trajectory]] | None) -> None:
        """An episode has ended; the longest of its branches, and its group if that is complete."""
        ...

    def changed(self) -> None: ...


@dataclass(slots=True)
class _Play:
    """An episode in the hands of an environment."""

    attempt: int
    replay: bool
    reached: dict[str, int]
    """By branch: how many tokens behind the prompt the environment knows of."""
    since: float
    """When it got the ball for the last time."""
    turns: dict[str, asyncio.Future[tuple[int, str]]] = field(
        default_factory=dict[str, "asyncio.Future[tuple[int, str]]"]
    )
    """Of the branches whose turn is open: where it ends, and why."""


class Episodes:
    def __init__(
        self, server: EpisodeServer, environments: Environments, control: Control, homes: Homes | None = None
    ) -> None:
        self.on_outcome: Callable[[str, Outcome], None] = lambda _episode, _outcome: None
        """Called when an episode has ended with a reward."""
        self.doing: Callable[[str], str] = lambda _episode: "environment"
        """What an environment does with an episode now, in a word or two."""
        self.on_failed: Callable[[str, str], None] = lambda _episode, _why: None
        self._server = server
        self._environments = environments
        self._control = control
        self._homes = homes or Homes()
        self._plays: dict[str, _Play] = {}

    # The control plane

    def begin(self, group: Group) -> None:
        for each in group.members:
            self._play(each.name)

    def recover(self) -> None:
        """After a restart: environments play again what had not ended."""
        for each in list(self._server):
            if each.branch is not None and not each.branch.parent and each.state in LIVE:
                self._play(each.name, replay=True)

    def turned(self, member: Member, news: TrajectoryNews) -> None:
        """An instance says that a turn ended."""
        name = news.trajectory
        if not self._server.turned(name, news.epoch, news.spans, news.chunk, news.reason or "length"):
            return
        each = self._server.trajectories[name]
        self._homes.turned(member, name, each.spans, each.context)
        self._environments.hold(self._hear, each, branch_of(each).turns[-1])

    def sweep(self) -> None:
        """Environments of episodes that are over, because their group was given up or is complete without them, end."""
        for name in list(self._plays):
            each = self._server.trajectories.get(name)
            if each is None or each.state not in LIVE:
                self._stop(name)
                self._environments.port.cancel(name)

    def close(self) -> None:
        for name in list(self._plays):
            self._stop(name)
            self._environments.port.cancel(name)

    def played(self, name: str) -> str:
        """What an environment does with an episode, and for how long."""
        play, doing = self._plays.get(episode_of(name)), self.doing(episode_of(name))
        return doing if play is None else f"{doing}, {_now() - play.since:.0f} s"

    # The pool

    def outcome(self, episode: str, attempt: int, outcome: Outcome) -> None:
        """How an environment ended an episode. What an earlier attempt says is too late."""
        play = self._plays.get(episode)
        if play is None or play.attempt != attempt:
            return
        if outcome.kind == "failed" or outcome.reward is None:
            self._failed(episode, outcome.why)
        elif not self._server.has_turns(episode):
            self._failed(episode, WITHOUT_A_TURN)
        elif play.replay and not self._reached_all(episode, play):
            self._failed(episode, REPLAY_DIFFERS)
        else:
            self.on_outcome(episode, outcome)
            self._stop(episode)
            masked = outcome.kind == "truncated" and self._environments.masks_truncated
            group = self._server.trajectories[episode].group
            longest = max(branches(group, episode), key=lambda each: each.generated)
            running, completed = self._server.ended(episode, outcome.reward, masked)
            if running:
                self._control.drop(running)
            self._control.finished(longest, completed)

    def lost(self, episode: str, attempt: int) -> None:
        """The process that played it died: another one plays it, up to where it was from what is recorded."""
        play = self._plays.get(episode)
        if play is not None and play.attempt == attempt:
            self._stop(episode)
            self._play(episode, attempt + 1, replay=True)

    # The endpoint

    def held(self, branch: str) -> list[int]:
        play, each = self._live(branch)
        payloads = self._server.payloads
        assert payloads is not None
        prompt = payloads.tokens(each.group.name)[: each.prompt_tokens].tolist()
        return prompt + payloads.tokens(branch)[: play.reached[branch]].tolist()

    async def turn(self, branch: str, at: int, given: Sequence[int], limit: int) -> Turn:
        play, each = self._live(branch)
        begin = at - each.prompt_tokens
        if begin == each.generated and each.state == "waiting":
            if not self._ask(each, begin, given, limit):
                return Turn([], [], (), "capacity")
        else:
            self._compare(play, each, begin, given)
        end, reason = await self._end_of(play, each, begin, begin + len(given))
        _, each = self._live(branch)
        play.reached[branch] = max(end, play.reached[branch])
        play.since = _now()
        payloads, made = self._server.payloads, slice(begin + len(given), end)
        spans = cut(each.spans, made.start, end)
        if payloads is None:
            return Turn([], [], spans, cast(Any, reason))
        tokens, logprobs = payloads.tokens(branch)[made].tolist(), payloads.logprobs(branch)[made].tolist()
        return Turn(tokens, logprobs, spans, cast(Any, reason))

    def branch(self, parent: str, shared: int) -> str:
        play, origin = self._live(parent)
        if shared > origin.prompt_tokens + play.reached[parent]:
            raise ValueError(f"{parent} holds fewer than {shared} tokens")
        known = branches(origin.group, episode_of(parent))
        for each in known:
            own = branch_of(each)
            if each.name not in play.reached and (own.parent, own.shared) == (parent, shared):
                break  # by a replay
        else:
            each = self._server.branch(parent, shared)
        play.reached[each.name] = shared - branch_of(each).prompt
        return each.name

    # Within

    def _play(self, name: str, attempt: int = 1, replay: bool = False) -> None:
        self._plays[name] = _Play(attempt, replay, {name: 0}, _now())
        self._environments.hold(self._tell, name, attempt)

    def _tell(self, name: str, attempt: int) -> None:
        """The environment to play it, now that everything about it is durable; unless it is over by now."""
        if (play := self._plays.get(name)) is not None and play.attempt == attempt:
            problem = self._environments.problem(self._server.trajectories[name].group.prompt)
            self._environments.port.play(name, attempt, problem)

    def _live(self, branch: str) -> tuple[_Play, Trajectory]:
        play, each = self._plays.get(episode_of(branch)), self._server.trajectories.get(branch)
        if play is None or each is None or branch not in play.reached or each.state not in LIVE:
            raise EpisodeOverError(f"{branch} is not a branch of an episode that is played")
        return play, each

    def _ask(self, each: Trajectory, begin: int, given: Sequence[int], limit: int) -> bool:
        """For a turn; False if there is no room for one."""
        made = made_count(each.spans)
        payloads = self._server.payloads
        most = payloads.limits.max_tokens if payloads is not None else NO_LIMIT
        if made >= most or (payloads is not None and begin - made + len(given) > payloads.limits.max_given):
            return False
        try:
            self._server.given(each.name, begin, given, min(most, made + limit) if limit else most)
        except BadReportError as error:
            raise ValueError(str(error)) from error
        self._control.changed()
        return True

    def _compare(self, play: _Play, each: Trajectory, begin: int, given: Sequence[int]) -> None:
        """What is asked for must be a turn that is open, or in the record."""
        end = begin + len(given)
        if begin == end == each.generated:
            return  # the open turn began with nothing
        try:
            same = begin >= 0 and end <= each.generated and all(run < 0 for run, _ in cut(each.spans, begin, end))
            if not same:
                raise ValueError(f"{each.name} is {each.state} with {each.generated} tokens: no turn begins at {begin}")
            self._server.given(each.name, begin, given, 0)
        except ValueError:
            if play.replay:
                self._failed(episode_of(each.name), REPLAY_DIFFERS)
                raise EpisodeOverError(f"{each.name} was played again, and asked for something else") from None
            raise

    async def _end_of(self, play: _Play, each: Trajectory, begin: int, made_from: int) -> tuple[int, str]:
        """Where the turn that began there ends, once it does, and why."""
        for end, reason in branch_of(each).turns:
            if end > begin and end >= made_from:
                return end, reason
        name = each.name
        if (ending := play.turns.get(name)) is None:
            ending = play.turns[name] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(ending)  # others may wait for it too

    def _hear(self, each: Trajectory, end: tuple[int, str]) -> None:
        """A turn has ended, and that is durable."""
        name = each.name
        play = self._plays.get(episode_of(name))
        if play is None or end not in branch_of(each).turns:
            return  # it is over, or began anew
        play.since = _now()
        if (ending := play.turns.pop(name, None)) is not None and not ending.done():
            ending.set_result(end)

    def _reached_all(self, episode: str, play: _Play) -> bool:
        """Whether an environment that is replayed came to the end of what is recorded."""
        return all(
            play.reached.get(each.name, -1) >= branch_of(each).turns[-1][0]
            for each in branches(self._server.trajectories[episode].group, episode)
            if branch_of(each).turns
        )

    def _failed(self, episode: str, why: str) -> None:
        """Again, or the group is given up. Its prompt gets one more chance then, as with rewards."""
        self.on_failed(episode, why)
        attempt = self._stop(episode)
        each = self._server.trajectories[episode]
        if branch_of(each).tries + 1 < self._environments.tries:
            self._control.drop(self._server.again(episode, why))
            self._play(episode, attempt + 1)
        else:
            self._control.give_up(each.group, why, each.group.attempt == 0)
        self._control.changed()

    def _stop(self, episode: str) -> int:
        """Whoever waits for a turn of it waits in vain. Returns which attempt it was."""
        play = self._plays.pop(episode)
        self._homes.forget(play.reached)
        for ending in play.turns.values():
            if not ending.done():
                ending.set_exception(EpisodeOverError(f"episode {episode} is over"))
                ending.exception()  # nobody may be waiting
        return play.attempt


LIVE = ("waiting", "queued", "running", "interrupted")


def cut(spans: Spans, begin: int, end: int) -> Spans:
    """Of the tokens from ``begin`` to ``end``."""
    found: list[tuple[int, int]] = []
    at = 0
    for version, size in spans:
        if (inside := min(at + size, end) - max(at, begin)) > 0:
            found.append((version, inside))
        at += size
    return tuple(found)


def _now() -> float:
    return asyncio.get_running_loop().time()
