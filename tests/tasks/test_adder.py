import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.tasks.adder import (
    ADDITIONS_P,
    END,
    EQUALS,
    MAX_RESPONSE_TOKENS,
    MODULUS,
    PROMPT_TOKENS,
    VOCABULARY,
    Adder,
    Teacher,
    is_held_out,
    make,
    respond,
    text,
)
from staleflow.tasks.task import Problem, Task, TaskError

problems = st.builds(make, st.integers(0, MODULUS - 1), st.integers(1, 9), st.integers(1, 36))
task = Adder()


def test_it_is_a_task() -> None:
    assert isinstance(task, Task)


def test_the_example_of_the_documentation() -> None:
    problem = make(49, 7, 3)
    assert isinstance(problem.prompt, tuple)
    assert text(problem.prompt) == "+7 #3 4 9"
    assert text(task.solve(problem)) == "#2 5 6 #1 6 3 #0 7 0 = 7 0 </s>"


@given(problems)
def test_correct_responses_are_rewarded(problem: Problem) -> None:
    response = task.solve(problem)
    assert len(response) == 3 * problem.facts["n"] + 4 <= MAX_RESPONSE_TOKENS
    assert len(problem.prompt) == PROMPT_TOKENS
    assert isinstance(problem.prompt, tuple)
    assert all(0 <= token < len(VOCABULARY) for token in (*problem.prompt, *response))
    assert task.verify(problem, response) == 1.0


@given(problems, st.data())
def test_a_changed_ending_is_not_rewarded(problem: Problem, data: st.DataObject) -> None:
    response = task.solve(problem)
    at = data.draw(st.integers(1, 4))
    wrong = data.draw(st.integers(0, len(VOCABULARY) - 1).filter(lambda token: token != response[-at]))
    response[-at] = wrong
    assert task.verify(problem, response) == 0.0


@given(problems)
def test_cut_extended_and_guessed_twice_are_not_rewarded(problem: Problem) -> None:
    response = task.solve(problem)
    for bad in ([], response[:-1], [*response, END], [EQUALS, *response], response[:-1] + response[-4:]):
        assert task.verify(problem, bad) == 0.0


@given(problems, st.integers(0, 2**36 - 1))
def test_any_forgotten_carry_costs_the_reward(problem: Problem, pattern: int) -> None:
    """Modulo 100 it would not: ten of them cancel."""
    forgotten: list[bool] = []

    def forgets(_increment: int) -> bool:
        forgotten.append(bool(pattern >> len(forgotten) & 1))
        return forgotten[-1]

    assert task.verify(problem, respond(problem, forgets)) == float(not any(forgotten))


def test_lengths_are_as_skewed_as_documented() -> None:
    mean = sum(p * (3 * n + 4) for n, p in enumerate(ADDITIONS_P, 1))
    spread = math.sqrt(sum(p * (3 * n + 4 - mean) ** 2 for n, p in enumerate(ADDITIONS_P, 1)))
    assert mean == pytest.approx(22.8, abs=0.05)
    assert spread / mean == pytest.approx(0.85, abs=0.01)
    drawn = [len(task.solve(task.problem(index))) for index in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, abs=4 * spread / math.sqrt(len(drawn)))


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_held_out_problems_are_never_trained_on(index: int, seed: int) -> None:
    for split in ("train", "held-out"):
        facts = Adder(seed).problem(index, split).facts
        assert is_held_out(facts["x"], facts["c"], facts["n"]) == (split == "held-out")
        assert Adder(seed).problem(index, split).facts == facts


def test_a_tenth_is_held_out() -> None:
    triples = [(x, c, n) for x in range(MODULUS) for c in range(1, 10) for n in range(1, 37)]
    assert 0.09 < sum(is_held_out(*triple) for triple in triples) / len(triples) < 0.11


def test_the_teacher_forgets_as_often_as_it_says() -> None:
    teacher = Teacher(forget=0.7, forget_small=0.25, small=2)
    grid = [at / 1000 for at in range(1000)]
    assert sum(teacher.forgets(2, chance) for chance in grid) == 250
    assert sum(teacher.forgets(3, chance) for chance in grid) == 700


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(TaskError, match="start at 0"):
        task.problem(-1)
