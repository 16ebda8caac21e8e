"""Held-out accuracy, measured beside the run: an engine of its own, greedy, on whatever version is the newest.

evaluator = Evaluator(engine, weights, problems, sampling, judge, folder, moved)
evaluator.keep()                                # a copy, to be evaluated when there is time
for evaluated in evaluator.evaluate(): ...      # what was kept, then the newest

What is kept is in files, for the evaluator that takes this one's place should it die.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from staleflow.config.schema import passes
from staleflow.reward.judge import Judgement
from staleflow.rollout.engine import Engine, LendingSource, Request, Sampling, WeightSource
from staleflow.tasks.task import Problem
from staleflow.types import Evaluate, Evaluated, Ready, Stop, TakeOver
from staleflow.workers.best import Best
from staleflow.workers.link import Gone, Link

KEPT = ".safetensors"
REWARD = "reward"
"""The figure that is always there: the mean reward."""

Judged = Callable[[Sequence[tuple[Problem, Sequence[int]]], Callable[[], None]], Sequence[Judgement | str]]
"""The rewards of responses, given as tokens, or why there is none; calls the function as it moves."""


Played = Callable[
    [Sequence[tuple[Sequence[int], Problem]], int, Sampling, Callable[[], None]],
    tuple[list[tuple[int, Judgement]], list[str]],
]
"""What ``judged`` gives, for problems that environments play."""
Responder = Callable[[Sequence[Request], Callable[[], None]], Iterable[tuple[str, Sequence[int]]]]
"""Gives the name of each request with the tokens of its response."""


class Evaluator:
    def __init__(
        self,
        engine: Engine,
        weights: LendingSource,
        problems: Sequence[tuple[Sequence[int], Problem]],
        sampling: Sampling,
        judge: Judged | None,
        folder: Path,
        moved: Callable[[], None] = lambda: None,
        samples: int = 1,
        names: Sequence[str] = (),
        best: Best | None = None,
        played: Played | None = None,
    ) -> None:
        """``folder``: for what is kept. ``moved`` is called whenever something was done. ``samples``: responses to each
        problem. ``names``: of the rewards, if there are several. ``best`` keeps the best version.
        ``played``: plays the problems, where nobody judges responses."""
        self._played = played
        self._samples = samples
        self._names = names
        self._best = best
        self._engine = engine
        self._folder = folder
        self._weights = weights
        self._problems = problems
        self._sampling = sampling
        self._judge = judge
        self._moved = moved
        engine.weights()  # their values are wanted after each pull

    def keep(self) -> None:
        """Copy the newest version, to be evaluated later."""
        self._folder.mkdir(exist_ok=True)
        draft = self._folder / "draft"

        def write(_: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
            save_file({name: tensor.clone() for name, tensor in tensors}, draft)

        version = self._weights.lend(write, 0)
        draft.replace(self._folder / f"{version:012d}{KEPT}")

    def evaluate(self) -> Iterator[Evaluated]:
        """What was kept, then the newest version."""
        for file in sorted(self._folder.glob(f"*{KEPT}")):
            yield self._evaluate(KeptWeights(file))
            file.unlink()
        yield self._evaluate(self._weights)

    def _evaluate(self, source: WeightSource) -> Evaluated:
        """A version and its mean reward on the problems. What cannot be scored is left out, and counted; if that is
        more than half, nothing is known of the version: it is not the best, and ends no run."""
        began = time.perf_counter()
        version = self._engine.pull(source, 0)
        if self._played is not None:
            scored, failures = self._played(self._problems, self._samples, self._sampling, self._moved)
        else:
            assert self._judge is not None
            answer = partial(respond, self._engine)
            scored, failures = judged(answer, self._problems, self._samples, self._sampling, self._judge, self._moved)
        found = figures(scored, self._names) if len(scored) >= len(failures) else {}
        evaluated = Evaluated(
            version,
            found.get(REWARD),
            time.perf_counter() - began,
            len(failures),
            failures[-1] if failures else "",
            binary=bool(scored) and all(each.reward in (0, 1) for _, each in scored),
            figures=found,
        )
        if self._best is not None and (why := self._best.offer(evaluated, self._engine.weights())):
            return msgspec.structs.replace(evaluated, trouble=why)
        return evaluated


def judged(
    answer: Responder,
    problems: Sequence[tuple[Sequence[int], Problem]],
    samples: int,
    sampling: Sampling,
    judge: Judged,
    moved: Callable[[], None],
) -> tuple[list[tuple[int, Judgement]], list[str]]:
    """Responses to each problem, judged, each with the number of its problem; and why the others could not be."""
    asked = [at for at in range(len(problems)) for _ in range(samples)]
    requests = [
        Request(str(number), 1, problems[at][0], sampling=replace(sampling, seed=number))
        for number, at in enumerate(asked)
    ]
    made = sorted((int(name), tokens) for name, tokens in answer(requests, moved))  # they come in any order
    answers = [(asked[number], tokens) for number, tokens in made]
    verdicts = judge([(problems[at][1], tokens) for at, tokens in answers], moved)
    both = [(at, verdict) for (at, _), verdict in zip(answers, verdicts, strict=True)]
    scored = [(at, each) for at, each in both if not isinstance(each, str)]
    return scored, [each for _, each in both if isinstance(each, str)]


def respond(
    engine: Engine, requests: Sequence[Request], moved: Callable[[], None]
) -> Iterator[tuple[str, Sequence[int]]]:
    """The name of each request and the tokens of its response, as the engine ends them."""
    engine.submit(requests)
    while engine.busy:
        for result in engine.step().finished:
            yield result.name, result.tokens
        moved()


def figures(scored: Sequence[tuple[int, Judgement]], names: Sequence[str]) -> dict[str, float]:
    """What can be said of judged responses, each with the number of its problem: empty if there are none."""
    if not scored:
        return {}
    rewards = [each.reward for _, each in scored]
    found = {REWARD: sum(rewards) / len(rewards)}
    if len(names) > 1:
        found |= {name: sum(each.parts[at] for _, each in scored) / len(scored) for at, name in enumerate(names)}
    if all(reward in (0, 1) for reward in rewards):
        by_problem: dict[int, list[float]] = {}
        for at, each in scored:
            by_problem.setdefault(at, []).append(each.reward)
        most = min(map(len, by_problem.values()))
        for k in passes(most):
            found[f"pass@{k}"] = fmean(pass_at(k, len(each), int(sum(each))) for each in by_problem.values())
    return found


def pass_at(k: int, samples: int, right: int) -> float:
    """The chance that one of ``k`` of the samples is right, without bias."""
    return 1 - comb(samples - right, k) / comb(samples, k)


class KeptWeights:
    """A version in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version = int(file.name.removesuffix(KEPT))

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:  # noqa: ARG002
        for name, tensor in load_file(self._file).items():
            into[name].copy_(tensor)
        return self._version

    def lend(self, use: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None], at_least: int) -> int:  # noqa: ARG002
        use(self._version, iter(load_file(self._file).items()))
        return self._version


def serve(evaluator: Evaluator, link: Link) -> None:
    """Evaluate whenever asked to; requests that came meanwhile are answered by one evaluation."""
    try:
        while True:
            messages = list(link.receive(None))
            if any(isinstance(message, Stop) for message in messages):
                return
            if any(isinstance(message, TakeOver) for message in messages):
                link.send(Ready(-1))
            asked = [message for message in messages if isinstance(message, Evaluate)]
            if any(message.now for message in asked):
                for evaluated in evaluator.evaluate():
                    link.send(evaluated)
            elif asked:
                evaluator.keep()
    except Gone:
        return
