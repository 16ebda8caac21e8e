"""Everything about a run that can be checked before anything heavy is loaded: the model's folder, the first row of the
data, the reward, the run directory, the memory.

    check(config)       # ConfigError with one line that says what to change
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from staleflow.config import ray
from staleflow.config.machine import Machine
from staleflow.config.memory import Estimate, estimate
from staleflow.config.rules import mismatches, refuse_values
from staleflow.config.schema import Config
from staleflow.config.sizes import Sizes, sizes_of
from staleflow.config.text import one_line
from staleflow.config.trainable import refuse_unmatched_names
from staleflow.errors import ConfigError, shown
from staleflow.reward.forks import own_functions
from staleflow.settings import registries
from staleflow.tasks.hub import hub_folder
from staleflow.tasks.options import EMBEDDED, SMOLLM, SOURCES, Data, is_file, is_hub_name
from staleflow.tasks.smollm import why_not
from staleflow.tasks.sources import columns, wrong_messages
from staleflow.training.options import ADVANTAGES, LOSSES, AggregationKind, Training


def check(config: Config, machine: Machine | None = None, room: bool = True, there: Config | None = None) -> None:
    """Refuse a run that cannot work, with one line that says what to change; ``room``: also for want of memory.
    ``there``: the configuration with which its processes run already, in memory that is not free."""
    try:
        _check(config)
        if room and (problem := _needs(config, machine, there).problem) is not None:
            raise ConfigError(problem)
    except ConfigError as error:
        raise ConfigError(one_line(error)) from None


def _needs(config: Config, machine: Machine | None, there: Config | None) -> Estimate:
    needs = estimate(config, machine)
    return needs if there is None else needs.in_place_of(estimate(there, machine))


def _check(config: Config) -> None:
    if sys.platform != "linux":
        raise ConfigError(f"a run needs Linux, and this is {sys.platform}: use a Linux machine, a container or WSL")
    refuse_values(config)
    for problem in ray.problems(config):
        raise ConfigError(problem)
    sizes = sizes_of(config)
    for problem in mismatches(config, sizes.vocabulary):
        raise ConfigError(problem)
    _model(config, sizes)
    refuse_unmatched_names(config, sizes)
    _data(config.data)
    for section in (config, *(getattr(config, each.name) for each in fields(config))):
        if is_dataclass(section):
            for registry, name, arguments in registries(section):
                registry.check(name, arguments)
    own_functions(config.reward)
    _knobs(config.training)
    _scope(config.training)
    _writable(config.runs, "runs")
    if config.model in (*EMBEDDED, SMOLLM):
        _writable(config.cache, "cache")


def _model(config: Config, sizes: Sizes) -> None:
    longest = config.longest_prompt + config.longest_response
    if longest > sizes.positions:
        given = config.longest_response - config.rollout.max_tokens
        ways = {
            "rollout.max_tokens": sizes.positions - config.longest_prompt - given,
            "data.max_prompt_tokens": sizes.positions - config.longest_response,
        } | ({"environment.max_given": sizes.positions - longest + given} if given else {})
        also = f" with environment.max_given={given}" if given else ""
        raise ConfigError(
            f"a prompt of {config.longest_prompt} tokens and a response of rollout.max_tokens="
            f"{config.rollout.max_tokens}{also} are longer than the {sizes.positions} positions of model="
            f"{config.model}: give "
            f"{' or '.join(f'{name}={most}' for name, most in ways.items() if most > 0) or 'both lower'}"
        )
    if config.model in EMBEDDED:
        return
    if config.model == SMOLLM:
        if (missing := why_not()) is not None:
            raise ConfigError(missing)
        return
    hub = is_hub_name(config.model)
    folder = hub_folder(config.model, weights=False) if hub else Path(config.model)
    if not hub and not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ConfigError(f"model={config.model}: the folder has no model.safetensors: save the model in that format")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model={config.model}: the folder has no tokenizer.json: save a fast tokenizer with it")
    if config.data.chat and not _has_chat_template(folder):
        raise ConfigError(f"model={config.model} has no chat template: give data.chat=false and a data.template")


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


# Data


def _data(data: Data) -> None:
    if not data.source:
        raise ConfigError("data.source is not given: give a file, as in data.source=.../train.jsonl")
    for setting, path in (("data.source", data.source), ("data.held_out", data.held_out)):
        if path is not None and is_file(path):
            _row(setting, path, data)


def _row(setting: str, source: str, data: Data) -> None:
    """Check that the first row has the named columns, and a prompt that the model can be asked."""
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{setting}={source}: no such file: correct the path")
    if path.suffix.lower() == ".parquet":
        SOURCES.check(source, {})
        names = _parquet_columns(path)
    else:
        first = _first_object(setting, path)
        names = list(first)
        if isinstance(messages := first.get(data.prompt), list):
            if (problem := wrong_messages(messages)) is not None:
                raise ConfigError(f"{source}: the prompt column {data.prompt!r} holds {problem}")
            if not data.chat:
                raise ConfigError(f"{setting}={source} has messages as prompts: give data.chat=true")
    wanted = [("data.prompt", each) for each in columns(data.prompt)]
    for name, column in (*wanted, *([("data.answer", data.answer)] if data.answer is not None else [])):
        if column not in names:
            none = ", or null if there is none" if name == "data.answer" else ""
            raise ConfigError(
                f"{source} has no column {column!r}: give {name}, one of {', '.join(names) or 'none'}{none}"
            )


def _first_object(setting: str, path: Path) -> Mapping[str, Any]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            line = next(islice((line for line in lines if line.strip()), 1), None)
        if line is None:
            raise ConfigError(f"{setting}={path}: the file is empty: name one with rows")
        row = json.loads(line)
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}={path} cannot be read ({error}): write one JSON object per line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{setting}={path}: the first line is a {type(row).__name__}: write one JSON object per line")
    return row


def _parquet_columns(path: Path) -> list[str]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        return list(parquet.read_schema(str(path)).names)
    except Exception as error:  # pyarrow has errors of its own
        raise ConfigError(f"{path} cannot be read ({error}): give a Parquet file") from None


def _knobs(training: Training) -> None:
    """Check that the user's own loss, loaded by now, takes the knobs that are given."""
    for knob in training.clip:
        if knob not in LOSSES.knobs(training.loss):
            raise ConfigError(f"training.loss={training.loss} has no {knob}: leave training.{knob} out")


def _scope(training: Training) -> None:
    """Check what the user's own advantage, loaded by now, says of itself: a slip would train parts of a batch alone."""
    if ADVANTAGES.key(training.advantage) is not None:
        return
    entry = ADVANTAGES.entry(training.advantage)
    for name, value, known in (
        ("scope", entry.scope, ("group", "batch")),
        ("aggregation", entry.aggregation, (None, *get_args(AggregationKind))),
    ):
        if value not in known:
            choices = ", ".join(f'"{each}"' for each in known if each)
            raise ConfigError(
                f"training.advantage={training.advantage} has {name} = {shown(value)}: write one of {choices}"
            )


def _writable(folder: str, setting: str) -> None:
    """Check that the folder, or the first one above it that exists, can be written."""
    path = Path(folder).absolute()
    place = next(each for each in (path, *path.parents) if each.exists())
    if not place.is_dir():
        raise ConfigError(f"{setting}={folder}: {place} is not a folder: give another folder by {setting}=...")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}={folder}: {place} cannot be written: give another folder by {setting}=...")
