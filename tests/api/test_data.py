"""Data of a Python program becomes data of a run: any rows, under the same name for the same content."""

import json
from datetime import date
from pathlib import Path

import pytest

import staleflow as sf
from staleflow.api.data import with_data
from staleflow.tasks.sources import read_file
from tests.refusals import refused


class Rows:
    """As much of a ``datasets.Dataset`` as is needed."""

    column_names = ("prompt", "answer")

    def __iter__(self):
        return iter([{"prompt": "2 + 2", "answer": "4"}, {"prompt": "3 + 3", "answer": "6"}])


class Table:
    """As much of a table of pandas, which iterates over its columns."""

    to_dict = iterrows = None

    def __iter__(self):
        return iter(["prompt", "answer"])


@pytest.fixture
def config(tmp_path: Path) -> sf.Config:
    return sf.load("plain", ["model=models/mine", f"cache={tmp_path}"])


def test_rows_texts_problems_and_a_dataset_are_written_down(config: sf.Config) -> None:
    rows = [{"prompt": "2 + 2", "answer": "4"}, {"prompt": "3 + 3", "answer": "6"}]
    sources = {with_data(config, each).data.source for each in (rows, tuple(rows), Rows(), iter(rows))}
    assert len(sources) == 1, "the same content has the same name"
    problems = read_file(sources.pop())
    assert problems == [sf.Problem(row["prompt"], row) for row in rows]
    assert with_data(config, problems).data.source == with_data(config, rows).data.source
    texts = with_data(config, ["one", "two"]).data.source
    assert [each.prompt for each in read_file(texts, answer=None)] == ["one", "two"]


def test_a_part_that_nothing_uses_is_refused(config: sf.Config) -> None:
    """With a misspelt name the run was evaluated on a tenth of its own problems."""
    rows = [{"prompt": "2 + 2", "answer": "4"}]
    assert "data has the part heldout, which nothing uses: call it held_out" in refused(
        with_data, config, {"train": rows, "heldout": rows}
    )
    parts = with_data(config, {"train": rows, "test": rows, "unlabelled": rows}).data
    assert parts.held_out is not None, "a data set may have more parts than a run"


def test_a_real_data_set_of_hugging_face_is_its_rows(config: sf.Config) -> None:
    datasets = pytest.importorskip("datasets", reason="needs pip install datasets")
    rows = [{"prompt": [{"role": "user", "content": f"{at}?"}], "answer": str(at)} for at in range(3)]
    made = datasets.Dataset.from_list(rows)
    assert with_data(config, made).data.source == with_data(config, rows).data.source
    assert with_data(config, made.to_iterable_dataset()).data.source == with_data(config, rows).data.source
    parts = with_data(config, datasets.DatasetDict(train=made, validation=made.select([0]))).data
    assert len(read_file(parts.source)) == 3
    assert parts.held_out is not None
    assert len(read_file(parts.held_out)) == 1
    dated = datasets.Dataset.from_list([{"prompt": "x", "day": date(2026, 1, 1)}])
    assert "data, row 0: Object of type date is not JSON" in refused(with_data, config, dated)


def test_messages_stay_messages(config: sf.Config) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    [problem] = read_file(with_data(config, [{"prompt": said, "answer": "4"}]).data.source)
    assert problem.prompt == said


def test_a_held_out_set_of_its_own(config: sf.Config, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "4 + 4", "answer": "8"}) + "\n")
    for name in ("held_out", "test", "validation"):
        data = with_data(config, {"train": Rows(), name: tmp_path / "test.jsonl"}).data
        assert data.held_out == str(tmp_path / "test.jsonl")
        assert data.source.endswith(".jsonl")
    assert "give train, and perhaps held_out" in refused(with_data, config, {"test": Rows()})


def test_files_and_names_on_the_hub_are_named(config: sf.Config, tmp_path: Path) -> None:
    assert with_data(config, tmp_path / "train.jsonl").data.source == str(tmp_path / "train.jsonl")
    assert with_data(config, "openai/gsm8k").data.source == "openai/gsm8k"
    assert with_data(config, None) is config


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "data is empty"),
        (7, "data is a int: give a file, a list of rows"),
        ([{"prompt": "x", "image": b"..."}], "data, row 0: Object of type bytes is not JSON serializable"),
        (Table(), 'data is a table of pandas: give its rows, with .to_dict("records")'),
        ([{"prompt": "x"}, 3], "data, row 1: a int: give dictionaries, texts or problems"),
        ([{"prompt": "x", "p": float("nan")}], "data, row 0: "),
    ],
)
def test_rows_that_cannot_be_sent_are_refused_by_number(config: sf.Config, data: object, says: str) -> None:
    assert says in refused(with_data, config, data)
