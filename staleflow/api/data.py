"""Data of this program as data of a run: rows are written down where every process of the run finds them.

    config = with_data(config, [{"prompt": "2 + 2", "answer": "4"}])
    config = with_data(config, {"train": "train.jsonl", "held_out": rows})

The file has the hash of its content in its name, so the same rows are the same source when a run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleflow.config import Config, ConfigError
from staleflow.files import write_whole
from staleflow.tasks.options import Data
from staleflow.tasks.task import Problem

HELD_OUT = ("held_out", "test", "validation")
"""Names that a held-out set may have; those of ``datasets`` among them."""


def with_data(config: Config, data: Any) -> Config:
    """The configuration with this data as its source."""
    if data is None:
        return config
    if isinstance(data, Mapping):
        train, held_out = _parts(data)
        source, held = _source(train, config), None if held_out is None else _source(held_out, config)
        return replace(config, data=replace(config.data, source=source, held_out=held, arguments={}))
    source = _source(data, config)
    of_another = {"arguments": {}, "held_out": None} if config.data.source != source else {}
    return replace(config, data=replace(config.data, source=source, **of_another))


def _parts(data: Mapping[str, Any]) -> tuple[Any, Any]:
    held = [name for name in HELD_OUT if name in data]
    if "train" not in data:
        raise ConfigError(f"data has the parts {', '.join(map(str, data)) or 'none'}: give train, and perhaps held_out")
    if not held and len(data) > 1:
        unused = next(name for name in data if name != "train")
        raise ConfigError(f"data has the part {unused}, which nothing uses: call it held_out, or leave it out")
    return data["train"], data[held[0]] if held else None


def _source(data: Any, config: Config) -> str:
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if not isinstance(data, Iterable):
        raise ConfigError(f"data is a {type(data).__name__}: give a file, a list of rows, or a datasets object")
    if hasattr(data, "to_dict") and hasattr(data, "iterrows"):  # it would iterate over its columns
        raise ConfigError('data is a table of pandas: give its rows, with .to_dict("records")')
    lines = "".join(f"{_line(at, row, config.data)}\n" for at, row in enumerate(data))
    if not lines:
        raise ConfigError("data is empty: give some rows")
    name = hashlib.blake2b(lines.encode(), digest_size=12).hexdigest()
    path = Path(config.cache) / "data" / f"{name}.jsonl"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(path, lines)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): name another folder as cache") from None
    return str(path.absolute())


def _line(at: int, row: Any, data: Data) -> str:
    if isinstance(row, Problem):
        row = {**row.facts, data.prompt: row.prompt}
    elif isinstance(row, str):
        row = {data.prompt: row}
    if not isinstance(row, Mapping):
        raise ConfigError(f"data, row {at}: a {type(row).__name__}: give dictionaries, texts or problems")
    try:
        return json.dumps(dict(row), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data, row {at}: {error}: keep to JSON values, or leave the column out") from None
