"""Data sources: files, generators and reasoning-gym tasks, as problems.

A source is a finite sequence of problems with text prompts, or a ``Task``, which is endless. ``prompts.py`` turns
either into the numbered prompts of a run::

    problems = read_jsonl("gsm8k/train.jsonl", prompt="question", answer="answer")
    problems = from_function("my_package.puzzles:make", seed=0, count=500)
    problems = reasoning_gym("leg_counting", seed=0, size=500)

``prompt`` is a column, or a text with columns in braces: ``"{Body} {Question}"``. All columns of a file are the
``facts`` that the reward function sees; the answer is ``facts["answer"]``.
"""

import importlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from staleflow.errors import line_of
from staleflow.tasks.hub import why_away
from staleflow.tasks.options import SOURCES
from staleflow.tasks.task import Problem, Task, TaskError

LARGEST = 64 * 2**20
"""Most bytes of a row, which is sent to a reward worker with each response."""


def read_jsonl(path: str | Path, prompt: str = "prompt", answer: str | None = "answer") -> list[Problem]:
    """Problems from a file with one JSON object per line; blank lines and a byte order mark are skipped."""
    problems: list[Problem] = []
    with _existing(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(BOM_UTF8).strip()
            if not text:
                continue
            try:
                row = json.loads(text.decode())
            except (ValueError, RecursionError) as error:
                raise TaskError(f"{path}, line {number}: not valid JSON ({error}): write one object per line") from None
            if not isinstance(row, dict):
                raise TaskError(f"{path}, line {number}: a {type(row).__name__}: write one JSON object per line")
            problems.append(_problem(f"{path}, line {number}", row, prompt, answer))
    return _some(problems, str(path))


def read_parquet(path: str | Path, prompt: str = "prompt", answer: str | None = "answer") -> list[Problem]:
    """Problems from a Parquet file, which is read as a whole; needs pyarrow."""
    parquet = require("pyarrow.parquet", "pyarrow", "Parquet files")
    try:
        rows = parquet.read_table(str(_existing(path))).to_pylist()
    except TaskError:
        raise
    except Exception as error:  # pyarrow has errors of its own
        raise TaskError(f"{path} cannot be read ({line_of(error)}): give a Parquet file") from None
    where = enumerate(rows, 1)
    return _some([_problem(f"{path}, row {number}", row, prompt, answer) for number, row in where], str(path))


def read_file(path: str | Path, prompt: str = "prompt", answer: str | None = "answer") -> list[Problem]:
    """Problems from a file of the kind that its ending names."""
    return SOURCES.load(str(path))(path, prompt, answer)


def from_function(
    spec: str, prompt: str = "prompt", answer: str | None = "answer", **arguments: Any
) -> Task | list[Problem]:
    """What ``module:function`` returns for ``arguments``: a task, or a list of problems or of rows like a file's."""
    made = SOURCES.load(spec)(**arguments)
    if isinstance(made, Task):
        return made
    if isinstance(made, str) or not isinstance(made, Sequence):
        raise TaskError(f"data {spec!r} returned a {type(made).__name__}: return a list of rows, or a task")
    rows = enumerate(made)
    return _some([_as_problem(f"data {spec!r}, item {at}", row, prompt, answer) for at, row in rows], f"data {spec!r}")


def read_hub(
    path: str, /, prompt: str = "prompt", answer: str | None = "answer", split: str = "train", **arguments: Any
) -> list[Problem]:
    """Problems from a data set on the Hugging Face hub, or from its cache on this machine; needs datasets."""
    datasets = require("datasets", "datasets", "data sets of the Hugging Face hub")
    if away := why_away(path):
        datasets.config.HF_HUB_OFFLINE = True  # it looks into its cache at once
    try:
        rows = datasets.load_dataset(path, split=split, **arguments)
    except Exception as error:  # the library has many kinds
        raise TaskError(
            f"{path} (split {split}) is not in the cache and cannot be loaded from the Hugging Face hub "
            f"({away or line_of(error)}): correct the name or data.arguments, or give a file"
        ) from None
    return _some([_problem(f"{path}, row {number}", row, prompt, answer) for number, row in enumerate(rows)], path)


def reasoning_gym(name: str, seed: int = 0, size: int = 10_000, **settings: Any) -> list[Problem]:
    """Entries of one reasoning-gym data set. The ``reasoning-gym`` reward scores the responses."""
    gym = require("reasoning_gym", "reasoning-gym", "reasoning-gym tasks")
    try:
        entries: Iterable[Mapping[str, Any]] = gym.create_dataset(name, seed=seed, size=size, **settings)
    except ValueError as error:
        raise TaskError(f"reasoning-gym has no task {name!r} with these settings ({error}): check the name") from None
    facts = ({"answer": each["answer"], "gym": name, "entry": dict(each)} for each in entries)
    return _some([Problem(str(each["entry"]["question"]), each) for each in facts], f"reasoning-gym task {name!r}")


def require(module: str, package: str, purpose: str) -> Any:
    """The module of an optional package, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TaskError(f"{purpose} need the package {package}: pip install {package}") from None


def columns(prompt: str) -> list[str]:
    """The columns that a prompt is made of."""
    return _BRACED.findall(prompt) or [prompt]


# Within

_BRACED = re.compile(r"\{([^{}]+)\}")


def _problem(where: str, row: Mapping[str, Any], prompt: str, answer: str | None) -> Problem:
    needed = columns(prompt)
    for column in (*needed, *([] if answer is None else [answer])):
        if column not in row:
            raise TaskError(f"{where}: no column {column!r}: name one of {', '.join(map(repr, row)) or 'none'}")
    _refuse_unsendable(where, row)
    facts = {**row, "answer": row[answer]} if answer is not None else dict(row)
    if needed == [prompt] and isinstance(row[prompt], list):
        if (problem := wrong_messages(row[prompt])) is not None:
            raise TaskError(f"{where}: the prompt column {prompt!r} holds {problem}")
        return Problem(row[prompt], facts)
    for column in needed:
        if not isinstance(row[column], str):
            kind = type(row[column]).__name__
            raise TaskError(f"{where}: the prompt column {column!r} holds a {kind}: name a column of text or messages")
    return Problem(row[prompt] if needed == [prompt] else _BRACED.sub(lambda found: row[found[1]], prompt), facts)


def wrong_messages(messages: Sequence[Any]) -> str | None:
    """What is wrong with a prompt of messages; None if nothing is."""
    for each in messages:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            return "a list: write messages, each with role and content"
        if not isinstance(each.get("content"), str):
            return f"a message whose content is a {type(each.get('content')).__name__}: write text"
    return None if messages else "no message: write at least one"


def _refuse_unsendable(where: str, row: Mapping[str, Any]) -> None:
    """``TaskError`` if the row cannot be sent to a reward worker: now, while file and line are known."""
    try:
        size = len(msgspec.msgpack.encode(dict(row)))
    except UnicodeEncodeError as error:
        raise TaskError(f"{where}: half a character ({error.object[error.start]!a}): correct the text") from None
    except OverflowError:
        raise TaskError(f"{where}: an integer of more than 64 bits: write it as a text") from None
    except RecursionError:
        raise TaskError(f"{where}: nested too deeply for a reward worker: write it flat") from None
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where}: cannot be sent to a reward worker ({error}): keep to JSON values") from None
    if size > LARGEST:
        raise TaskError(
            f"{where}: a row of {size / 2**20:,.0f} MiB, more than the {LARGEST // 2**20} MiB that can go to a reward "
            "worker with each response: leave large columns out, or write paths instead"
        )


def _as_problem(where: str, row: Any, prompt: str, answer: str | None) -> Problem:
    if isinstance(row, Problem):
        return row
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a {type(row).__name__}: return dictionaries or problems")
    return _problem(where, row, prompt, answer)


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise TaskError(f"{path}: no such file: correct the path of the data")
    return Path(path)


def _some(problems: list[Problem], where: str) -> list[Problem]:
    if not problems:
        raise TaskError(f"{where}: no items: name data that has some")
    return problems
