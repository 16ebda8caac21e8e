"""Held-out problems, played instead of answered: episodes over the evaluator's own engine.

    played = played_by(engine, config.environment, task, model_folder)
    scored, failures = played(task.held_out, samples, sampling, moved)

Workers, endpoint and limits are those of the training. An episode that fails is played again, up to
``environment.tries`` times, and is then left out, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from staleflow.agents.endpoint import Endpoint
from staleflow.agents.local import LocalEpisodes
from staleflow.agents.options import Environment
from staleflow.agents.outcome import Outcome, failed
from staleflow.agents.pool import EnvironmentPool
from staleflow.agents.render import Renderer, opened
from staleflow.reward.judge import IN_A_ROW, Judgement
from staleflow.rollout.engine import Engine, Sampling
from staleflow.tasks.opening import TaskSet
from staleflow.tasks.task import Problem

Asked = Sequence[tuple[Sequence[int], Problem]]


def played_by(engine: Engine, options: Environment, task: TaskSet, folder: Path) -> Played:
    return Played(engine, options, opened(folder, task.stop_tokens, options), task.conversation)


class Played:
    def __init__(
        self, engine: Engine, options: Environment, renderer: Renderer, said: Callable[[Problem], Problem]
    ) -> None:
        """``said``: a problem with its prompt as messages."""
        self._engine = engine
        self._options = options
        self._renderer = renderer
        self._said = said

    def __call__(
        self, problems: Asked, samples: int, sampling: Sampling, moved: Callable[[], None]
    ) -> tuple[list[tuple[int, Judgement]], list[str]]:
        """What each episode got, with the number of its problem; and why the others got nothing."""
        return asyncio.run(self._play(problems, samples, sampling, moved))

    async def _play(
        self, problems: Asked, samples: int, sampling: Sampling, moved: Callable[[], None]
    ) -> tuple[list[tuple[int, Judgement]], list[str]]:
        asked = {str(number): number // samples for number in range(len(problems) * samples)}
        ended: dict[str, Outcome] = {}
        in_a_row = 0
        news = asyncio.Event()
        episodes = LocalEpisodes(self._engine, sampling)

        def begin(name: str, attempt: int) -> None:
            tokens, problem = problems[asked[name]]
            episodes.end(name)
            episodes.begin(name, tokens)
            pool.play(name, attempt, self._said(problem))

        def end(name: str, attempt: int, outcome: Outcome) -> None:
            nonlocal in_a_row
            news.set()
            if outcome.kind == "failed" and attempt < self._options.tries:
                begin(name, attempt + 1)
                return
            episodes.end(name)
            ended[name] = outcome
            in_a_row = in_a_row + 1 if outcome.kind == "failed" else 0

        def lost(name: str, attempt: int) -> None:
            end(name, attempt, failed("its worker died"))

        endpoint = Endpoint(episodes, self._renderer, sampling, max_turns=self._options.max_turns)
        pool = EnvironmentPool(self._options, endpoint, end, lost)
        await endpoint.start()
        try:
            await pool.start()
            for name in asked:
                begin(name, 1)
            while len(ended) < len(asked) and in_a_row < IN_A_ROW:
                news.clear()
                try:
                    async with asyncio.timeout(1.0):  # the pool is alive, whatever an episode takes
                        await news.wait()
                except TimeoutError:
                    pass
                moved()
        finally:
            await pool.close()
            await endpoint.close()
            for name in asked:
                episodes.end(name)
        scored = [(asked[name], Judgement(each.reward)) for name, each in ended.items() if each.reward is not None]
        failures = [each.why for each in ended.values() if each.reward is None]
        if left := len(asked) - len(ended):
            failures += [f"not played after {IN_A_ROW} failures, last: {failures[-1]}"] * left
        return scored, failures
