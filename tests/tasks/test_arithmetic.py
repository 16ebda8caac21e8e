import re

import pytest

from staleflow.tasks.arithmetic import problems
from staleflow.tasks.task import TaskError


@pytest.mark.parametrize(("digits", "operations", "count"), [(1, "+-*", None), (2, "+", 500), (9, "*-", 50)])
def test_answers_are_right_and_no_question_comes_twice(digits: int, operations: str, count: int | None) -> None:
    rows = problems(digits, operations, count)
    assert count is None or len(rows) == count
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        found = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", row["prompt"])
        assert found is not None
        a, operation, b = int(found[1]), found[2], int(found[3])
        assert len(found[1]) == len(found[3]) == digits
        assert int(row["answer"]) == {"+": a + b, "-": a - b, "*": a * b}[operation] >= 0


def test_all_questions_of_one_digit_are_there() -> None:
    assert len(problems(1, "+")) == 81
    assert len(problems(1, "+-*")) == 81 + 45 + 81


def test_a_seed_draws_others() -> None:
    assert problems(2, count=20, seed=1) == problems(2, count=20, seed=1) != problems(2, count=20, seed=2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [({"operations": "/"}, "give some of"), ({"operations": ""}, "give some of"), ({"digits": 0}, "at least 1")],
)
def test_arguments_that_make_no_sense(arguments: dict[str, int | str], line: str) -> None:
    with pytest.raises(TaskError, match=line):
        problems(**arguments)  # pyright: ignore[reportArgumentType]


def test_too_many_to_list_need_a_count() -> None:
    with pytest.raises(TaskError, match="give a count"):
        problems(digits=4)
