import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.servers.payloads import TOKEN
from staleflow.servers.trajectories import Prompts
from staleflow.tasks.adder import Adder
from staleflow.tasks.prompts import DataPrompts, TaskPrompts
from staleflow.tasks.task import Messages, Problem, TaskError


def encode(text: str | Messages) -> list[int]:
    assert isinstance(text, str)
    return list(text.encode())


def data(lengths: list[int]) -> list[Problem]:
    return [Problem(chr(97 + at % 26) * length, {"at": at}) for at, length in enumerate(lengths)]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 99), st.integers(1, 3))
def test_prompts_that_are_too_long_are_left_out_and_all_others_read(lengths: list[int], seed: int, epochs: int) -> None:
    fitting = [at for at, length in enumerate(lengths) if 0 < length <= 8]
    if not fitting:
        with pytest.raises(TaskError, match="raise the limit"):
            DataPrompts(data(lengths), encode, seed, max_tokens=8)
        return
    prompts = DataPrompts(data(lengths), encode, seed, max_tokens=8, epochs=epochs)
    assert (prompts.too_long, prompts.empty) == (sum(length > 8 for length in lengths), lengths.count(0))
    for epoch in range(epochs):
        numbers = range(epoch * len(fitting), (epoch + 1) * len(fitting))
        assert sorted(prompts.item(number) for number in numbers) == fitting
    assert prompts.tokens(epochs * len(fitting)) is None
    with pytest.raises(TaskError, match="past the end"):
        prompts.ids(epochs * len(fitting))


@given(st.integers(0, 10**6), st.integers(0, 99))
def test_tokens_ids_and_problem_speak_of_the_same_item_after_a_resume(number: int, seed: int) -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    first: Prompts = DataPrompts(data(lengths), encode, seed)
    resumed = DataPrompts(data(lengths), encode, seed)
    problem = resumed.problem(number)
    assert isinstance(problem.prompt, str)
    assert first.tokens(number) == len(problem.prompt)
    assert np.frombuffer(first.ids(number), TOKEN).tolist() == encode(problem.prompt)


def test_a_resume_with_other_data_can_be_noticed() -> None:
    same = [DataPrompts(data([3, 1, 4]), encode, seed=1, max_tokens=9, epochs=epochs) for epochs in (None, 2)]
    others = [
        DataPrompts(data([3, 1, 4]), encode, seed=2, max_tokens=9),
        DataPrompts(data([3, 1, 4]), encode, seed=1, max_tokens=8),
        DataPrompts(data([3, 1, 5]), encode, seed=1, max_tokens=9),
        DataPrompts(data([3, 1]), encode, seed=1, max_tokens=9),
        TaskPrompts(Adder(1)),
        TaskPrompts(Adder(2)),
        TaskPrompts(Adder(1), "held-out"),
    ]
    assert same[0].fingerprint == same[1].fingerprint
    assert len({same[0].fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
    assert TaskPrompts(Adder(1)).fingerprint == TaskPrompts(Adder(1)).fingerprint


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(TaskError, match="empty"):
        DataPrompts([], encode)


def test_a_task_is_numbered_without_end() -> None:
    prompts: Prompts = TaskPrompts(Adder(5))
    assert prompts.tokens(10**9) == 4
    assert tuple(np.frombuffer(prompts.ids(10**9), TOKEN).tolist()) == Adder(5).problem(10**9).prompt


def test_a_split_of_a_task_has_its_own_problems() -> None:
    prompts = TaskPrompts(Adder(), "held-out")
    assert prompts.problem(1) == Adder().problem(1, "held-out")


def test_a_task_of_text_needs_an_encoder() -> None:
    class Words:
        def problem(self, index: int, split: str = "train") -> Problem:
            return Problem(f"{split} {index}", {})

        def verify(self, problem: Problem, tokens: object) -> float:
            return float(bool(problem and tokens))

    assert TaskPrompts(Words(), encode=encode).tokens(12) == len("train 12")
    with pytest.raises(TaskError, match="give the encode function"):
        TaskPrompts(Words()).tokens(0)
