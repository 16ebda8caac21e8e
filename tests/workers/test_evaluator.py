"""Versions that were kept are evaluated as they were, however many came after."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.reward.function import Response, checked
from staleflow.reward.judge import Judgement
from staleflow.rollout.builtin import EngineOptions, TorchEngine
from staleflow.rollout.engine import Sampling
from staleflow.tasks.base_model import new_model
from staleflow.tasks.task import Problem
from staleflow.training.checksums import damage
from staleflow.types import Evaluated
from staleflow.workers.best import Best
from staleflow.workers.evaluator import Evaluator, Judged, figures, pass_at
from tests.tiny_models import TINY, save_tiny

PROBLEMS = [((5 + at, 7), Problem("", {"at": at})) for at in range(6)]


class Store:
    """Version v has the weights of seed v."""

    version = 0

    def pull(self, into: Mapping[str, Any], at_least: int) -> int:
        return self.lend(lambda _, tensors: [into[name].copy_(tensor) for name, tensor in tensors], at_least)

    def lend(self, use: Callable[[int, Iterator[tuple[str, Any]]], Any], at_least: int) -> int:  # noqa: ARG002
        use(self.version, iter(new_model(TINY, seed=self.version).state_dict().items()))
        return self.version


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path, seed=99)


def evaluator(folder: Path, store: Store, reward: Any) -> Evaluator:
    engine = TorchEngine(folder, EngineOptions(kv_tokens=256, max_running=8, threads=1), version=-1)
    sampling = Sampling(temperature=0.0, max_tokens=8)
    return Evaluator(engine, store, PROBLEMS, sampling, in_process(reward), folder / "kept")


def in_process(reward: Any) -> Judged:
    def judge(answers: Sequence[tuple[Problem, Sequence[int]]], moved: Callable[[], None]) -> list[Judgement | str]:
        moved()
        found: list[Judgement | str] = []
        for problem, tokens in answers:
            try:
                found.append(Judgement(checked(reward(problem, Response("", tuple(tokens))))))
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


def test_a_version_that_could_hardly_be_scored_is_not_the_best_and_does_not_reach_the_goal(folder: Path) -> None:
    """An environment that was away for all problems but one made 100 % of the first version."""

    def only_one(problem: Problem, _: Response) -> float:
        if problem.facts["at"]:
            raise RuntimeError("away")
        return 1.0

    class Asked(Best):
        def offer(self, evaluated: Evaluated, weights: Any) -> str:  # noqa: ARG002
            assert not evaluated.figures
            return ""

    under_test = evaluator(folder, Store(), only_one)
    under_test._best = Asked(folder / "best", folder, "reward")  # pyright: ignore[reportPrivateUsage]
    one = next(under_test.evaluate())
    assert (one.accuracy, one.failed, one.figures) == (None, 5, {})


def test_several_responses_to_a_problem_give_pass_at_k(folder: Path) -> None:
    engine = TorchEngine(folder, EngineOptions(kv_tokens=256, max_running=8, threads=1), version=-1)
    judge = in_process(lambda _, response: float(sum(response.tokens) % 2))
    sampling = Sampling(temperature=1.0, max_tokens=8)
    evaluated = next(Evaluator(engine, Store(), PROBLEMS, sampling, judge, folder / "kept", samples=4).evaluate())
    assert evaluated.binary
    assert evaluated.accuracy == evaluated.figures["reward"]
    assert set(evaluated.figures) == {"reward", "pass@2", "pass@4"}
    assert evaluated.figures["reward"] < evaluated.figures["pass@2"] < evaluated.figures["pass@4"]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_one(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    choices = list(combinations(right, k))
    assert pass_at(k, len(right), sum(right)) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_several_rewards_are_reported_by_name_and_pass_at_k_only_of_zeros_and_ones() -> None:
    scored = [(0, Judgement(1.5, (1.0, 0.5))), (0, Judgement(0.5, (0.0, 0.5)))]
    assert figures(scored, ("correct", "brief")) == {"reward": 1.0, "correct": 0.5, "brief": 0.5}
    assert figures([], ("correct", "brief")) == {}


def test_the_best_version_is_kept_as_a_model_and_no_worse_one_takes_its_place(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints" / "best"
    kept.parent.mkdir()
    model = new_model(TINY, seed=3)
    best = Best(kept, folder, "reward")

    def offered(version: int, value: float) -> str:
        with torch.no_grad():
            model.lm_head.weight.fill_(version)
        return best.offer(Evaluated(version, value, 0.0, 0, "", figures={"reward": value}), dict(model.state_dict()))

    assert [offered(0, 0.2), offered(5, 0.6), offered(10, 0.5)] == [""] * 3
    assert json.loads((kept / "best.json").read_text()) == {"version": 5, "figure": "reward", "value": 0.6}
    loaded = AutoModelForCausalLM.from_pretrained(kept)
    assert (loaded.lm_head.weight == 5).all()
    assert AutoTokenizer.from_pretrained(kept).eos_token == "</s>"
    assert [each.name for each in kept.parent.iterdir()] == ["best"]
    assert damage(kept) == ""
    (kept / "model.safetensors").write_bytes(b"x")
    assert "model.safetensors" in damage(kept)
    kept.rename(kept.with_name(".old-best"))  # the evaluator died between two renames
    (kept.with_name(".draft-best")).mkdir()
    again = Best(kept, folder, "reward")  # that of a resumed run
    assert [each.name for each in kept.parent.iterdir()] == ["best"]
    assert again.offer(Evaluated(11, 0.6, 0.0, 0, "", figures={"reward": 0.6}), {}) == ""
    shutil.rmtree(kept.parent)
    assert "could not be written" in offered(15, 0.9)
