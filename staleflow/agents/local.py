"""Episodes over an engine in the same process: for the evaluator, the synchronous loop and tests.

    episodes = LocalEpisodes(engine, sampling)
    episodes.begin("p7/3", prompt)
    async with endpoint: ...                     # or await episodes.turn("p7/3", at, given, limit)
    episodes.row("p7/3", reward)

Turns of many episodes decode together: the engine steps as long as it has work, and between two steps others run.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from staleflow.agents.turns import EpisodeOverError, Turn
from staleflow.errors import RunError
from staleflow.rollout.engine import Engine, Request, Result
from staleflow.rollout.options import Sampling
from staleflow.types import GIVEN, Failed, Row, Spans, episode_of, made_count


@dataclass(slots=True)
class _Branch:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: Spans = ()
    asked: int = -1
    """Tokens, with the prompt, that its latest turn began with."""
    epoch: int = 0
    turn: "asyncio.Future[Turn] | None" = None

    @property
    def held(self) -> list[int]:
        return self.prompt + self.tokens


class LocalEpisodes:
    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self._branches: dict[str, _Branch] = {}
        self._driver: asyncio.Task[None] | None = None

    def begin(self, episode: str, prompt: Sequence[int]) -> None:
        self._branches[episode] = _Branch(list(prompt))

    def end(self, episode: str) -> None:
        """Forget it; what is in flight is dropped."""
        for name in self.branches(episode):
            turn = self._branches.pop(name).turn
            if turn is not None and not turn.done():
                self.engine.abort([name])
                _fail(turn, EpisodeOverError(f"{episode} is over"))

    def branches(self, episode: str) -> list[str]:
        return [name for name in self._branches if episode_of(name) == episode]

    def held(self, branch: str) -> list[int]:
        return self._of(branch).held

    def spans(self, branch: str) -> Spans:
        return self._of(branch).spans

    def row(self, branch: str, reward: float, masked: bool = False) -> Row:
        """A branch as the trainer gets it."""
        of = self._of(branch)
        return Row.of(branch, of.prompt, of.tokens, of.logprobs, of.spans, reward, episode_of(branch), masked)

    def branch(self, parent: str, shared: int) -> str:
        of = self._of(parent)
        name = f"{episode_of(parent)}~{len(self.branches(episode_of(parent)))}"
        kept = of.held[:shared][len(of.prompt) :]
        made = _Branch(of.prompt[:shared], kept, [0.0] * len(kept), ((GIVEN, len(kept)),) if kept else ())
        self._branches[name] = made
        return name

    async def turn(self, branch: str, at: int, given: Sequence[int], limit: int) -> Turn:
        of = self._of(branch)
        if of.turn is None or at + len(given) != of.asked:
            if at != len(of.prompt) + len(of.tokens) or (of.turn is not None and not of.turn.done()):
                raise RunError(f"{branch} holds other tokens than those before this turn: open a branch")
            self._begin(branch, of, given, limit)
        assert of.turn is not None
        return await asyncio.shield(of.turn)

    def _begin(self, name: str, of: _Branch, given: Sequence[int], limit: int) -> None:
        of.turn = asyncio.get_running_loop().create_future()
        begun = _Branch(of.prompt, [*of.tokens, *given], [*of.logprobs, *[0.0] * len(given)], _given(of.spans, given))
        of.asked = len(begun.prompt) + len(begun.tokens)
        of.epoch += 1
        made = made_count(of.spans)
        most = min(self.sampling.max_tokens, made + limit) if limit else self.sampling.max_tokens
        if made >= most:
            of.turn.set_result(Turn([], [], (), "length"))
            return
        sampling = replace(self.sampling, max_tokens=most)
        asked = Request(name, of.epoch, begun.prompt, begun.tokens, begun.logprobs, begun.spans, sampling=sampling)
        self.engine.submit([asked])
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        try:
            while self.engine.busy:
                output = self.engine.step()
                for result in output.finished:
                    self._ended(result)
                for failed in output.failed:
                    self._failed(failed)
                await asyncio.sleep(0)
        except Exception as error:
            for of in self._branches.values():
                if of.turn is not None and not of.turn.done():
                    _fail(of.turn, error)

    def _ended(self, result: Result) -> None:
        of = self._branches.get(result.name)
        if of is None or of.turn is None or of.turn.done() or result.epoch != of.epoch:
            return
        assert result.reason != "interrupted"
        new = of.asked - len(of.prompt)
        turn = Turn(result.tokens[new:], result.logprobs[new:], _after(result.spans, new), result.reason)
        of.tokens, of.logprobs, of.spans = list(result.tokens), list(result.logprobs), result.spans
        of.turn.set_result(turn)

    def _failed(self, failed: Failed) -> None:
        of = self._branches.get(failed.name)
        if of is not None and of.turn is not None and not of.turn.done():
            _fail(of.turn, RunError(f"{failed.name}: {failed.message}"))

    def _of(self, branch: str) -> _Branch:
        if branch not in self._branches:
            raise EpisodeOverError(f"{branch} is over")
        return self._branches[branch]


def _fail(turn: "asyncio.Future[Turn]", error: Exception) -> None:
    turn.set_exception(error)
    turn.exception()  # nobody may be waiting


def _given(spans: Spans, given: Sequence[int]) -> Spans:
    if not given:
        return spans
    if spans and spans[-1][0] == GIVEN:
        return (*spans[:-1], (GIVEN, spans[-1][1] + len(given)))
    return (*spans, (GIVEN, len(given)))


def _after(spans: Spans, skip: int) -> Spans:
    """The spans without their first ``skip`` tokens."""
    found: list[tuple[int, int]] = []
    for version, count in spans:
        left = max(0, count - skip)
        skip -= count - left
        if left:
            found.append((version, left))
    return tuple(found)
