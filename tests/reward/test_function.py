import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.errors import ConfigError
from staleflow.reward import verifiers
from staleflow.reward.function import Response, RewardError, Score, checked
from staleflow.reward.function import load_reward as load
from staleflow.reward.options import Reward
from staleflow.tasks.adder import Adder
from staleflow.tasks.task import Problem
from tests.reward import functions


def load_reward(function: str, **arguments: Any) -> Score:
    return load(Reward(function, arguments))


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9) | st.booleans())
def test_finite_numbers_are_rewards(value: float) -> None:
    assert checked(value) == float(value)
    assert isinstance(checked(value), float)


def test_scalars_of_arrays_are_rewards() -> None:
    assert checked(np.float32(0.5)) == 0.5
    assert checked(np.array([2])) == 2.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "nan: return a finite"),
        (-math.inf, "-inf: return a finite"),
        (10**400, "inf: return a finite"),
        (np.float64("nan"), "nan: return a finite"),
        ("1.0", "'1.0', a str: return a number"),
        (None, "None, a NoneType: return a number"),
        ([1.0], "a list: return a number"),
        (1j, "a complex"),
        (np.array([1, 2]), "several numbers"),
        ("x" * 1000, r"\.\.\., a str"),
    ],
)
def test_anything_else_is_a_failure_and_never_zero(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        checked(value)


def test_a_function_is_found_by_its_name() -> None:
    problem, response = Problem("?", {}), Response("good")
    assert load_reward("tests.reward.functions:behave")(problem, response) == functions.behave(problem, response)
    assert load_reward("exact-match").func is verifiers.exact_match  # type: ignore[attr-defined]


def test_arguments_are_given_by_name_or_refused() -> None:
    weighed = load_reward("tests.reward.functions:weighed", weight=0.25)
    assert weighed(Problem("?", {}), Response("four")) == 1.0
    with pytest.raises(ConfigError, match=r"cannot be called .*: write def weighed\(problem, response"):
        load_reward("tests.reward.functions:weighed", wait=0.25)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no-such", "one of adder, exact-match, last-number, math-verify, reasoning-gym"),
        ("tests.reward.functions:no_such", "has no no_such"),
        ("tests.reward.functions:NOT_A_FUNCTION", "name a function"),
        ("no_such_module:f", "importing no_such_module failed"),
    ],
)
def test_a_reward_that_does_not_exist_is_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_reward(spec)
    assert "\n" not in str(error.value)


def test_exact_match_compares_the_stripped_text() -> None:
    score = load_reward("exact-match")
    problem = Problem("?", {"answer": 42})
    assert [score(problem, Response(text)) for text in (" 42\n", "42.", "")] == [1.0, 0.0, 0.0]
    with pytest.raises(RewardError, match="no fact 'answer' \\(it has 'solution'\\)"):
        score(Problem("?", {"solution": 1}), Response("1"))


def test_the_last_number_is_compared_as_a_number() -> None:
    score = load_reward("last-number")
    for answer, text, reward in [
        ("9 * 2 = <<9*2=18>>18\n#### 18", "16 - 3 - 4 = 9, so $18.00.", 1.0),
        (145.0, "It is 145", 1.0),
        ("#### 1,250", "1250", 1.0),
        ("#### -3", "3", 0.0),
        ("#### 18", "no idea", 0.0),
    ]:
        assert score(Problem("?", {"answer": answer}), Response(text)) == reward
    with pytest.raises(RewardError, match="has no number"):
        score(Problem("?", {"answer": "none"}), Response("1"))


def test_the_adder_verifies_tokens() -> None:
    score, task = load_reward("adder"), Adder()
    problem = task.problem(0)
    assert score(problem, Response("", tuple(task.solve(problem)))) == 1.0
    assert score(problem, Response("", ())) == 0.0


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("spec", "module"), [("math-verify", "math_verify"), ("reasoning-gym", "reasoning_gym")], ids=str
)
def test_a_missing_package_says_what_to_install(spec: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {spec}"):
        load_reward(spec)


def test_math_verify_gets_the_right_answer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str, **_: None) -> list[str]:
        return text.split()

    def verify(gold: list[str], given: list[str], **_: None) -> bool:
        return gold[0] in given

    fake(monkeypatch, "math_verify", parse=parse, verify=verify)
    score = load_reward("math-verify")
    assert score(Problem("?", {"answer": "7"}), Response("it is 7")) == 1.0
    assert score(Problem("?", {"answer": "7"}), Response("8")) == 0.0
    with pytest.raises(RewardError, match="cannot read the right answer"):
        score(Problem("?", {"answer": ""}), Response("8"))


def test_reasoning_gym_scores_with_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "reasoning_gym", get_score_answer_fn=lambda name: lambda answer, entry: entry[name] == answer)
    score = load_reward("reasoning-gym")
    problem = Problem("?", {"gym": "sums", "entry": {"sums": "4"}})
    assert score(problem, Response(" 4 ")) == 1.0
    assert score(problem, Response("5")) == 0.0
