"""Held-out accuracy, measured beside the run: an engine of its own, greedy, on whatever version is the newest.

evaluator = Evaluator(engine, weights, problems, sampling, reward, decode)
evaluator.keep()                                # a copy, to be evaluated when there is time
for evaluated in evaluator.evaluate(): ...      # what was kept, then the newest
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from staleflow.reward.function import Response, Score, reward_of
from staleflow.rollout.engine import Engine, LoadWeights, Request, Sampling, WeightSource
from staleflow.tasks.task import Problem
from staleflow.types import Evaluate, Evaluated, Stop
from staleflow.workers.link import Gone, Link


class Evaluator:
    def __init__(
        self,
        engine: Engine,
        weights: WeightSource,
        problems: Sequence[tuple[Sequence[int], Problem]],
        sampling: Sampling,
        reward: Score,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._engine = engine
        self._kept: list[tuple[int, dict[str, torch.Tensor]]] = []
        self._weights = weights
        self._problems = problems
        self._sampling = sampling
        self._reward = reward
        self._decode = decode

    def keep(self) -> None:
        """Copy the newest version, to be evaluated later."""
        copies = {name: torch.empty_like(tensor) for name, tensor in self._engine.weights().items()}
        version = self._weights.pull(copies, 0)
        if not self._kept or self._kept[-1][0] < version:
            self._kept.append((version, copies))

    def evaluate(self) -> Iterator[Evaluated]:
        """What was kept, then the newest version."""
        kept, self._kept = self._kept, []
        for version, copies in kept:
            yield self._evaluate(lambda into, version=version, copies=copies: _copied(into, version, copies))
        yield self._evaluate(self._weights)

    def _evaluate(self, source: WeightSource | LoadWeights) -> Evaluated:
        """A version and its mean reward on the problems. What cannot be scored is left out, and counted."""
        began = time.perf_counter()
        version = self._engine.pull(source, 0)
        self._engine.submit(
            [
                Request(str(at), 1, prompt, sampling=replace(self._sampling, seed=at))
                for at, (prompt, _) in enumerate(self._problems)
            ]
        )
        rewards: list[float] = []
        failed, why = 0, ""
        with asyncio.Runner() as runner:
            while self._engine.busy:
                for result in self._engine.step().finished:
                    problem = self._problems[int(result.name)][1]
                    response = Response(self._decode(result.tokens), tuple(result.tokens))
                    try:
                        rewards.append(reward_of(self._reward, problem, response, runner))
                    except Exception as error:  # whatever the user's function raises
                        failed, why = failed + 1, " ".join(f"{type(error).__name__}: {error}".split())[:300]
        accuracy = sum(rewards) / len(rewards) if rewards else None
        return Evaluated(version, accuracy, time.perf_counter() - began, failed, why)


def _copied(into: Mapping[str, Any], version: int, copies: Mapping[str, torch.Tensor]) -> int:
    for name, tensor in copies.items():
        into[name].copy_(tensor)
    return version


def serve(evaluator: Evaluator, link: Link) -> None:
    """Evaluate whenever asked to; requests that came meanwhile are answered by one evaluation."""
    try:
        while True:
            messages = list(link.receive(None))
            if any(isinstance(message, Stop) for message in messages):
                return
            asked = [message for message in messages if isinstance(message, Evaluate)]
            if any(message.now for message in asked):
                for evaluated in evaluator.evaluate():
                    link.send(evaluated)
            elif asked:
                evaluator.keep()
    except Gone:
        return
