"""Versions that were kept are evaluated as they were, however many came after."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from staleflow.reward.function import Response, checked
from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Sampling
from staleflow.tasks.base_model import new_model
from staleflow.tasks.task import Problem
from staleflow.workers.evaluator import Evaluator, Judged
from tests.tiny_models import TINY, save_tiny

PROBLEMS = [((5 + at, 7), Problem("", {"at": at})) for at in range(6)]


class Store:
    """Version v has the weights of seed v."""

    version = 0

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:  # noqa: ARG002
        model = new_model(TINY, seed=self.version)
        for name, tensor in model.state_dict().items():
            into[name].copy_(tensor)
        return self.version


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path, seed=99)


def evaluator(folder: Path, store: Store, reward: Any) -> Evaluator:
    engine = TorchEngine(folder, EngineOptions(kv_tokens=256, max_running=8, threads=1), version=-1)
    sampling = Sampling(temperature=0.0, max_tokens=8)
    return Evaluator(engine, store, PROBLEMS, sampling, in_process(reward), folder / "kept")


def in_process(reward: Any) -> Judged:
    def judge(answers: Sequence[tuple[Problem, Sequence[int]]], moved: Callable[[], None]) -> list[float | str]:
        moved()
        found: list[float | str] = []
        for problem, tokens in answers:
            try:
                found.append(checked(reward(problem, Response("", tuple(tokens)))))
            except Exception as error:
                found.append(str(error))
        return found

    return judge


def score(_: Problem, response: Response) -> float:
    return sum(response.tokens) / 1000


def test_kept_versions_are_evaluated_as_they_were(folder: Path) -> None:
    alone: dict[int, float | None] = {}
    for version in range(3):
        store = Store()
        store.version = version
        alone[version] = next(evaluator(folder, store, score).evaluate()).accuracy
    assert len(set(alone.values())) == 3, "versions differ, or this would show nothing"
    store, together = Store(), {}
    under_test = evaluator(folder, store, score)
    for version in range(2):
        store.version = version
        under_test.keep()
        under_test.keep()  # asked twice, kept once
    store.version = 2
    for each in under_test.evaluate():
        assert each.version not in together
        together[each.version] = each.accuracy
    assert together == pytest.approx(alone)


def test_versions_that_a_dead_evaluator_kept_are_evaluated_by_the_next(folder: Path) -> None:
    """They were in its memory, and reported as missing."""
    store = Store()
    first = evaluator(folder, store, score)
    for store.version in range(2):
        first.keep()
    store.version = 2
    assert [each.version for each in evaluator(folder, store, score).evaluate()] == [0, 1, 2]
    assert [each.version for each in evaluator(folder, store, score).evaluate()] == [2], "once"


def test_responses_that_cannot_be_scored_are_counted_and_are_no_zeros(folder: Path) -> None:
    def sometimes(problem: Problem, _: Response) -> float:
        if problem.facts["at"] % 2:
            raise RuntimeError("the service is down")
        return 1.0

    evaluated = next(evaluator(folder, Store(), sometimes).evaluate())
    assert (evaluated.accuracy, evaluated.failed) == (1.0, 3)
    assert "the service is down" in evaluated.why
    none = next(evaluator(folder, Store(), lambda *_: torch.nan).evaluate())
    assert (none.accuracy, none.failed) == (None, 6)
