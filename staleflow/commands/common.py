"""What commands have in common: how settings are given, pictures, processes, progress, and refusals.

``train``, ``simulate``, ``compare``, ``plan`` and ``profile`` take the same ``[CONFIG] [key=value ...]``. An option
such as ``--staleness 1`` is a short way to write a setting. Mistakes are a ``StaleFlowError`` of one line, raised
before anything runs or is written; ``staleflow.cli`` prints it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.config import PRESETS, Config, load
from staleflow.config.convert import NAMES, full_name
from staleflow.config.field_names import elsewhere
from staleflow.config.gpus import GPUS
from staleflow.config.loading import is_settings_file
from staleflow.config.machine import cores
from staleflow.config.presets import LAPTOP, PAPER, PLAIN
from staleflow.config.text import one_line, render_flow
from staleflow.errors import ConfigError
from staleflow.files import write_whole
from staleflow.observe.output import remark

if TYPE_CHECKING:
    from rich.console import Console

    from staleflow.simulate.setting import Setting

    Subparsers = argparse._SubParsersAction[Any]  # pyright: ignore[reportPrivateUsage]
else:
    Subparsers = object

SHORT = {
    "instances": "rollout.instances",
    "groups": "groups",
    "group_size": "group_size",
    "staleness": "staleness",
    "steps": "steps",
    "seed": "seed",
    "trace": "cluster.trace",
    "profile": "cluster.profile",
    "gpu": "cluster.gpu",
    "model": "model",
    "engine": "rollout.engine",
    "device": "rollout.device",
    "dtype": "rollout.dtype",
    "threads": "processes.threads",
}
"""Options that are short for a setting."""
LATEST = "runs/latest"
"""The run that is meant where none is named."""
GPUS_PER_NODE = 8
"""If nobody says otherwise."""
LENGTHS = ("cluster.lengths", "cluster.mean_tokens", "cluster.between")
WIDTH = 132
"""Columns of a table that is not shown on a terminal."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """The argument that names a run."""
    parser.add_argument(
        "directory", nargs="?", default=LATEST, metavar="RUN", help=f"its directory (default: {LATEST})"
    )


def refuse(error: object, code: int = 2) -> int:
    """Print what is wrong on one line, whatever characters are in it."""
    remark(f"error: {one_line(error)}")
    return code


# Settings


def typed() -> str:
    """What to type for this program here: its name, or its path where that is not on the search path."""
    path = Path(sys.executable).with_name("staleflow")
    if not path.exists() or shutil.which("staleflow") == str(path):
        return "staleflow"
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


OWN_DEFAULT = f"{LAPTOP}, or {PLAIN} where model= names another model"


def add_settings(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG | KEY=VALUE",
        help=f"a preset ({', '.join(PRESETS)}) or a .yaml or .toml file (default: {default}), then changes such as "
        "rollout.instances=4; a section that only one setting of that name has may be left out",
    )


def add_simulated(parser: argparse.ArgumentParser, staleness: Callable[[str], Any] = int) -> None:
    """Options of the commands that simulate. ``staleness`` parses the value of its option."""
    add_settings(parser, PAPER)
    parser.add_argument("--preset", metavar="NAME", help="the same as CONFIG")
    parser.add_argument("--instances", type=int, metavar="N", help="rollout instances")
    parser.add_argument("--gpus", type=int, metavar="N", help="all GPUs; split in CONFIG's proportion by default")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines; with --gpus-per-node instead of --gpus")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help=f"GPUs of a machine (default: {GPUS_PER_NODE}, with --nodes)"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"kind of GPU: costs and memory follow from it and from the model: {', '.join(GPUS)}",
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="a folder with the model's config.json, or a name: costs and memory follow"
    )
    parser.add_argument("--groups", type=int, metavar="N", help="groups for each step")
    parser.add_argument("--group-size", type=int, metavar="N", help="responses of a group")
    several = " (with commas: several)" if staleness is not int else ""
    parser.add_argument("--staleness", type=staleness, metavar="N", help=f"the bound, in steps{several}")
    parser.add_argument("--steps", type=int, metavar="N", help="steps to train")
    parser.add_argument(
        "--trace",
        metavar="FILE.csv",
        help="recorded lengths: column output_tokens, perhaps prompt_tokens and group",
    )
    parser.add_argument(
        "--profile", metavar="FILE.json", help="what engine steps cost, as staleflow profile measured it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


@dataclass(slots=True)
class GivenSettings:
    """The settings on a command line."""

    source: str | None
    """A preset or a file."""
    words: list[str]
    """``key=value``, also for options that are short for a setting."""
    names: set[str]
    """Full names of the settings in ``words``."""

    def config(self, default: str = LAPTOP) -> Config:
        return load(self.source, self.words, default)


def as_setting(option: str) -> str | None:
    """What to write instead of an option such as ``--learning-rate=1e-5`` that is a setting; None if it is not."""
    name, _, value = option.lstrip("-").partition("=")
    try:
        found = full_name(name.replace("-", "_"))
    except ConfigError as error:  # a setting of several sections
        return str(error)
    if found in NAMES:
        return f"settings are written without dashes: {found}={value or 'VALUE'}"
    return elsewhere(name)


def given_settings(options: argparse.Namespace) -> GivenSettings:
    """What was given, each setting once. Their values are checked by ``load``."""
    sources = [word for word in options.words if not _is_setting(word)]
    sources += [options.preset] if getattr(options, "preset", None) is not None else []
    if len(sources) > 1:
        raise ConfigError(f"{sources[0]!r} and {sources[1]!r} are both not key=value: give one preset or file")
    words = [word for word in options.words if _is_setting(word)]
    names: set[str] = set()
    for name in (full_name(word.partition("=")[0].strip()) for word in words):
        if name in names:
            raise ConfigError(f"{name} is given twice: give it once")
        names.add(name)
    for option, name in SHORT.items():
        if (value := getattr(options, option, None)) is not None:
            if name in names:
                raise ConfigError(f"{name} is given twice: give --{option.replace('_', '-')} or {name}=, not both")
            names.add(name)
            words.append(f"{name}={render_flow(value)}")
    if "cluster.trace" in names and (given := [name for name in LENGTHS if name in names]):
        raise ConfigError(f"{given[0]} has no meaning with a trace, whose lengths are recorded: leave one out")
    return GivenSettings(sources[0] if sources else None, words, names)


def _is_setting(word: str) -> bool:
    return "=" in word and not is_settings_file(word)  # such as sweep/lr=1e-5/run.yaml


def read_setting(options: argparse.Namespace, wanted: GivenSettings) -> tuple[Config, Setting]:
    """The configuration, and the setting to simulate."""
    from staleflow.config.costs import on_other_hardware
    from staleflow.simulate.setting import setting_of

    other = options.model is not None or "cluster.gpu" in wanted.names
    config = load(wanted.source or PAPER, wanted.words) if other else wanted.config(PAPER)
    if other:
        gpus = config.rollout.instances * config.cluster.gpus_per_instance + config.cluster.training_gpus
        config = on_other_hardware(config, wanted.names)
        if options.gpus is None and options.nodes is None and options.gpus_per_node is None:
            options.gpus = gpus  # as many as before, though instances may have become larger
    setting = fitted(options, wanted, setting_of(config, wanted.source or PAPER))
    return config, replace(setting, name=config.model) if other else setting


def fitted(options: argparse.Namespace, wanted: GivenSettings, setting: Setting) -> Setting:
    """The setting on the requested number of GPUs. What cannot run is refused."""
    from staleflow.simulate.setting import with_gpus

    gpus = gpus_of(options, setting.gpus_per_instance)
    if gpus is not None:
        setting = with_gpus(setting, gpus, wanted.names)
    setting.check()
    return setting


def gpus_of(options: argparse.Namespace, per_instance: int) -> int | None:
    """All GPUs that were asked for; None: those of the configuration."""
    if options.nodes is None and options.gpus_per_node is None:
        return options.gpus
    for name in ("nodes", "gpus_per_node"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is impossible: give 1 or more")
    each = options.gpus_per_node or GPUS_PER_NODE
    if options.nodes is None and options.gpus is not None and options.gpus % each == 0:
        options.nodes = options.gpus // each
    gpus = (options.nodes or 1) * each
    if options.gpus not in (None, gpus):
        raise ConfigError(f"--nodes and --gpus-per-node are {gpus} GPUs, not --gpus {options.gpus}: leave one out")
    if per_instance > each:
        raise ConfigError(
            f"an instance of {per_instance} GPUs does not fit into a node of {each}: give a GPU with more memory, "
            "--gpus-per-node, or cluster.gpus_per_instance"
        )
    return gpus


# Processes and progress


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=cores(), metavar="N", help="processes (default: one for each core)")


def check_jobs(jobs: int) -> int:
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} is impossible: give 1 or more")
    return jobs


@contextmanager
def refuse_stuck() -> Iterator[None]:
    """Turn what ends a simulated run early into an error of one line."""
    from concurrent.futures.process import BrokenProcessPool

    from staleflow.runtime.control import StalledError
    from staleflow.simulate.clock import DeadlockError
    from staleflow.simulate.invariants import BrokenInvariantError

    try:
        yield
    except (StalledError, DeadlockError) as error:
        raise StalledError(f"the run is stuck: {error}") from None
    except BrokenInvariantError as error:
        raise StalledError(f"a promise was broken, please report it with the command: {error}") from None
    except BrokenProcessPool:
        raise StalledError("a process was ended from outside, perhaps for its memory: give fewer --jobs") from None


def console() -> Console:
    from rich.console import Console  # takes a while to load, and only tables need it

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


# Files that are asked for


def check_output(option: str, name: str, suffix: str = "") -> Path:
    """Refuse a path that cannot become a file before the work, not after it."""
    path = Path(name)
    if not path.name.endswith(suffix):
        raise ConfigError(f"{option} {name} is not an {suffix[1:].upper()} file: give a name that ends in {suffix}")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {name} cannot be written: give a file in a folder that exists and is yours")
    return path


def check_picture(name: str | None) -> Path | None:
    return None if name is None else check_output("--picture", name, ".svg")


def write_picture(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"--picture {path}: {error.strerror}: give a path that can be written") from None
