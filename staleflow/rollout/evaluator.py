"""Held-out accuracy, measured beside the run: an engine of its own, greedy, on whatever version is the newest.

    evaluator = Evaluator(engine, weights, prompts, sampling, score)
    version, accuracy = evaluator.evaluate()
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from staleflow.reward.function import Response, Reward, checked
from staleflow.rollout.engine import Engine, Request, Sampling, WeightSource
from staleflow.runtime.local.link import Gone, Link
from staleflow.runtime.local.messages import Evaluate, Evaluated, Stop
from staleflow.tasks.task import Problem


class Evaluator:
    def __init__(
        self,
        engine: Engine,
        weights: WeightSource,
        problems: Sequence[tuple[Sequence[int], Problem]],
        sampling: Sampling,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._problems = problems
        self._sampling = sampling
        self._reward = reward
        self._decode = decode

    def evaluate(self) -> tuple[int, float]:
        """The newest version and its mean reward on the problems."""
        version = self._engine.pull(self._weights, 0)
        self._engine.submit(
            [
                Request(str(at), 1, prompt, sampling=replace(self._sampling, seed=at))
                for at, (prompt, _) in enumerate(self._problems)
            ]
        )
        total = 0.0
        with asyncio.Runner() as runner:
            while self._engine.busy:
                for result in self._engine.step().finished:
                    problem = self._problems[int(result.name)][1]
                    response = Response(self._decode(result.tokens), tuple(result.tokens))
                    total += self._score(problem, response, runner)
        return version, total / len(self._problems)

    def _score(self, problem: Problem, response: Response, runner: asyncio.Runner) -> float:
        async def awaited(value: object) -> object:
            return await value if inspect.isawaitable(value) else value

        value: object = self._reward(problem, response)
        return checked(runner.run(awaited(value)) if inspect.isawaitable(value) else value)


def serve(evaluator: Evaluator, link: Link) -> None:
    """Evaluate whenever asked to; requests that came meanwhile are answered by one evaluation."""
    try:
        while True:
            messages = list(link.receive(None))
            if any(isinstance(message, Stop) for message in messages):
                return
            if any(isinstance(message, Evaluate) for message in messages):
                began = time.perf_counter()
                version, accuracy = evaluator.evaluate()
                link.send(Evaluated(version, accuracy, time.perf_counter() - began))
    except Gone:
        return
