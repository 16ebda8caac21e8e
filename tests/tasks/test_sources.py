import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.errors import ConfigError
from staleflow.tasks.adder import Adder
from staleflow.tasks.sources import from_function, read_file, read_jsonl, read_parquet, reasoning_gym
from staleflow.tasks.task import Problem, TaskError

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1), "level": n} for n in range(4)]


def jsonl(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def rows(**arguments: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{arguments['seed']}/{at}", "answer": at} for at in range(arguments["count"])]


def made_problems() -> list[Problem]:
    return [Problem((1, 2), {})]


def endless() -> Adder:
    return Adder(3)


def a_generator() -> Any:
    yield from ROWS


def numbers() -> list[int]:
    return [1]


def nothing() -> list[int]:
    return []


NOT_A_FUNCTION = 3


def test_jsonl_rows_become_problems_with_all_their_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", *map(json.dumps, ROWS), "")
    problems = read_file(path, prompt="question")
    assert [problem.prompt for problem in problems] == [row["question"] for row in ROWS]
    assert [problem.facts for problem in problems] == ROWS
    assert read_jsonl(path, prompt="question", answer="level")[3].facts["answer"] == 3


def test_a_prompt_can_be_made_of_several_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", '{"body": "Two {birds}.", "ask": "How many?", "right": 2.0}')
    (problem,) = read_jsonl(path, prompt="Q: {body} {ask}", answer="right")
    assert problem.prompt == "Q: Two {birds}. How many?"
    assert problem.facts["answer"] == 2.0


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """As editors on Windows write it, with their line ends; the first line was refused as not being JSON."""
    path = tmp_path / "data.jsonl"
    rows = "\r\n".join(map(json.dumps, ROWS))
    for before in ("", "\r\n"):  # a blank line that holds nothing but the mark is blank
        path.write_bytes(f"{before}{rows}".encode("utf-8-sig"))
        assert [problem.facts for problem in read_jsonl(path, "question")] == ROWS


@pytest.mark.parametrize(
    ("lines", "columns", "message"),
    [
        (['{"a": "x"}'], ("{a} {b}", None), "no column 'b': name one of 'a'$"),
        (['{"a": "x"}'], ("question", None), "no column 'question': name one of 'a'$"),
        (['{"a": "x", "b": 1}'], ("a", "answer"), "no column 'answer': name one of 'a', 'b'$"),
        (['{"a": "x"}', '{"b": 1}'], ("a", None), "line 2: no column 'a': name one of 'b'$"),
        (["{"], ("a", None), "line 1: not valid JSON .* one object per line"),
        (["[1]"], ("a", None), "a list: write one JSON object"),
        (['{"a": 3}'], ("a", None), "holds a int: name a column of text"),
        ([""], ("a", None), "no items"),
    ],
)
def test_bad_rows_are_one_clear_line(
    tmp_path: Path, lines: list[str], columns: tuple[str, str | None], message: str
) -> None:
    with pytest.raises(TaskError, match=message) as error:
        read_jsonl(jsonl(tmp_path / "data.jsonl", *lines), *columns)
    assert "\n" not in str(error.value)


def test_missing_files_and_unknown_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="correct the path"):
        read_file(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"write one of adder, calculator, a \.jsonl file"):
        read_file(tmp_path / "data.csv")


def test_generators_make_rows_problems_or_a_task() -> None:
    found = from_function(f"{__name__}:rows", seed=5, count=2)
    assert found == [Problem("5/0", {"prompt": "5/0", "answer": 0}), Problem("5/1", {"prompt": "5/1", "answer": 1})]
    assert from_function(f"{__name__}:made_problems") == [Problem((1, 2), {})]
    assert from_function(f"{__name__}:endless") == Adder(3)


@pytest.mark.parametrize(
    ("name", "message"),
    [("a_generator", "returned a generator"), ("numbers", "item 0: a int"), ("nothing", "no items")],
)
def test_generators_that_make_something_else_are_refused(name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        from_function(f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "or module:function"),
        (":name", "or module:function"),
        ("no_such_module_anywhere:f", "importing no_such_module_anywhere failed"),
        (f"{__name__}:missing", "has no missing"),
        (f"{__name__}:NOT_A_FUNCTION", "is a int: name a function"),
    ],
)
def test_functions_that_cannot_be_found_are_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        from_function(spec)
    assert "\n" not in str(error.value)


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "pyarrow", "pyarrow.parquet", "reasoning_gym")
    path = jsonl(tmp_path / "data.parquet", "")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: read_parquet(path), "pip install pyarrow"),
        (lambda: reasoning_gym("sums"), "pip install reasoning-gym"),
    ]
    for call, message in calls:
        with pytest.raises(TaskError, match=message):
            call()


def test_parquet_rows_are_read_like_jsonl_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(to_pylist=lambda: ROWS)
    fake(monkeypatch, "pyarrow")
    fake(monkeypatch, "pyarrow.parquet", read_table=lambda _path: table)
    path = jsonl(tmp_path / "data.parquet", "")
    assert [problem.facts for problem in read_file(path, prompt="question")] == ROWS
    with pytest.raises(TaskError, match="row 1: no column 'prompt': name one of 'question', 'answer', 'level'"):
        read_parquet(path)


def test_reasoning_gym_entries_keep_what_their_scorer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dataset(name: str, seed: int, size: int) -> list[dict[str, Any]]:
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        return [{"question": f"q{seed}.{at}", "answer": str(at), "metadata": {}} for at in range(size)]

    fake(monkeypatch, "reasoning_gym", create_dataset=create_dataset)
    first, second = reasoning_gym("sums", seed=4, size=2)
    assert (first.prompt, second.prompt) == ("q4.0", "q4.1")
    assert second.facts == {
        "answer": "1",
        "gym": "sums",
        "entry": {"question": "q4.1", "answer": "1", "metadata": {}},
    }
    with pytest.raises(TaskError, match="check the name"):
        reasoning_gym("products")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": "a", "answer": %s}' % ("[" * 20_000 + "]" * 20_000), "not valid JSON"),
        ('{"prompt": "a", "answer": %s}' % ("9" * 5_000), "not valid JSON"),
        ('{"prompt": "a", "answer": %s}' % ("9" * 30), "an integer of more than 64 bits: write it as a text"),
        ('{"prompt": "a\\ud800", "answer": "1"}', "half a character"),
        ('{"prompt": "a", "answer": {"x": ["\\udfff"]}}', "half a character"),
        ('{"prompt": "a", "answer": "%s"}' % ("x" * 2_000_000), "a row of 2 MiB, more than the 1 MiB"),
    ],
    ids=["deep", "5,000 digits", "30 digits", "surrogate in the prompt", "surrogate inside", "large"],
)
def test_a_hostile_row_is_named_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, why: str
) -> None:
    monkeypatch.setattr("staleflow.tasks.sources.LARGEST", 2**20)
    path = jsonl(tmp_path / "data.jsonl", '{"prompt": "a", "answer": "1"}', row)
    with pytest.raises(TaskError) as error:
        read_jsonl(path)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert why in str(error.value)
    assert "\n" not in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
LINES = st.one_of(
    st.binary(max_size=40),
    st.fixed_dictionaries({"prompt": JSON, "answer": JSON}).map(lambda row: json.dumps(row).encode()),
    st.fixed_dictionaries({"prompt": st.text(max_size=5), "answer": JSON}).map(lambda row: json.dumps(row).encode()),
)


@given(st.lists(LINES, max_size=4), st.sampled_from([".jsonl", ".parquet"]))
@settings(max_examples=150, deadline=None)
def test_any_data_file_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ending: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{ending}"
    path.write_bytes(b"\n".join(lines))
    try:
        problems = read_file(path)
    except TaskError as error:
        problems = []
        assert "\n" not in str(error).replace(str(path), "")  # noqa: PT017
    assert all(isinstance(problem.prompt, str) for problem in problems)
