"""What the commands that simulate have in common: their options, the setting that these ask for, and where pictures go.

Whatever is wrong is told in one line (``ConfigError``, ``WorkloadError``), before anything runs or is written.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from staleflow.config.machine import cores
from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import ConfigError
from staleflow.simulate.presets import PRESETS, VARIANTS, Setting, preset, with_lengths, with_split
from staleflow.simulate.workload import (
    Bimodal,
    Distribution,
    Lognormal,
    PowerLaw,
    Sampled,
    Source,
    Uniform,
    Workload,
    load_trace,
)

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[Any]  # pyright: ignore[reportPrivateUsage]
else:
    Subparsers = object

OPTIONS = ("instances", "groups", "group_size", "staleness", "steps")
"""Settings that have an option of their own; every other one is written ``key=value``."""

MOST = 10**12
"""No setting needs a larger whole number, and sums of smaller ones stay exact wherever they are counted."""

Changes = dict[str, Any]


def add_options(parser: argparse.ArgumentParser, staleness: Callable[[str], Any] = int) -> None:
    """The options that say what to simulate. ``staleness`` reads the value of its option."""
    parser.add_argument("--preset", default="paper-14b", help=f"the cluster: {', '.join(PRESETS)} (default: paper-14b)")
    parser.add_argument("--instances", type=int, metavar="N", help="rollout instances")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="all GPUs; split as the preset does, unless told otherwise"
    )
    parser.add_argument("--groups", type=int, metavar="N", help="groups for each step")
    parser.add_argument("--group-size", type=int, metavar="N", help="trajectories in a group")
    several = " (with commas: several)" if staleness is not int else ""
    parser.add_argument("--staleness", type=staleness, metavar="N", help=f"the bound, in steps{several}")
    parser.add_argument("--steps", type=int, metavar="N", help="steps to train")
    parser.add_argument(
        "--trace", metavar="FILE.csv", help="recorded lengths: columns prompt_tokens,output_tokens and perhaps group"
    )
    parser.add_argument(
        "--profile", metavar="FILE.json", help="what engine steps cost, as staleflow profile measured it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any setting of strategies, cluster or workload: consume=batch mu=0.3 training_gpus=16 max_tokens=8000",
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=cores(), metavar="N", help="processes (default: one for each core)")


def check_jobs(jobs: int) -> int:
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} is impossible; give 1 or more")
    return jobs


def refuse(error: Exception | str, code: int = 2) -> int:
    """Say on one line what is wrong, whatever the values in it hold."""
    print(f"staleflow: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


# Settings


def read_setting(options: argparse.Namespace, base: Setting | None = None) -> Setting:
    """The preset, or the given base, with what the options and the overrides change."""
    changes = read_changes(options)
    base = preset(options.preset) if base is None else base
    if (variant := changes.get("lengths")) in VARIANTS:
        if given := [key for key in ("between", "scale", "mean_tokens") if key in changes]:
            raise ConfigError(f"lengths={variant} says what {given[0]} is; leave one out")
        if not isinstance(base.workload.source, Sampled):
            raise ConfigError(f"lengths={variant} has no meaning where lengths are measured; leave it out")
        base = with_lengths(base, changes.pop("lengths"))
    known = settable()
    parts = {owner: {key: changes[key] for key in changes if known[key][0] is owner} for owner in OWNERS}
    setting = replace(base, **parts[Setting], strategies=replace(base.strategies, **parts[Strategies]))
    if options.gpus is not None:
        setting = with_gpus(setting, options.gpus, {"instances", "training_gpus"} & changes.keys())
    workload = replace(base.workload, source=lengths(changes, base.workload.source))
    if options.trace is not None:
        if given := [key for key in LENGTHS if key in changes] or ["lengths"] * bool(variant):
            raise ConfigError(f"{given[0]} has no meaning with --trace, whose lengths are recorded; leave one out")
        workload = load_trace(options.trace, group_size=setting.group_size)
    if options.profile is not None:
        setting = replace(setting, rollout=read_profile(options.profile))
    setting = replace(setting, workload=replace(workload, **parts[Workload]))
    setting.check()
    return setting


def with_gpus(setting: Setting, gpus: int, given: Set[str]) -> Setting:
    """The setting on so many GPUs. What is given of its two parts stays; otherwise their proportion does."""
    size = setting.gpus_per_instance
    if gpus < size + 1:
        raise ConfigError(f"--gpus {gpus} are too few for an instance of {size} and a trainer; give {size + 1} or more")
    if given == {"instances", "training_gpus"} and setting.gpus != gpus:
        raise ConfigError(
            f"instances={setting.instances} of {size} and training_gpus={setting.training_gpus} are {setting.gpus} "
            f"GPUs, not --gpus {gpus}; leave one of the three out"
        )
    training = setting.training_gpus
    if "instances" in given:
        training = gpus - setting.instances * size
    elif "training_gpus" not in given:
        instances = round(gpus * setting.instances * size / setting.gpus / size)
        training = gpus - min(max(1, instances), (gpus - 1) // size) * size
    return with_split(replace(setting, instances=1, training_gpus=gpus - size), training)


def read_changes(options: argparse.Namespace) -> Changes:
    """What the options and the overrides say, each thing once."""
    changes = read_overrides(options.overrides)
    for name in OPTIONS:
        if (value := getattr(options, name)) is not None:
            if name in changes:
                raise ConfigError(f"{name} is given twice; give --{name.replace('_', '-')} or {name}=, not both")
            changes[name] = value
    return changes


def read_profile(name: str) -> CostModel:
    """The coefficients in a file of ``staleflow profile``."""
    try:
        found = json.loads(Path(name).read_text())["coefficients"]
        values = {field.name: float(found[field.name]) for field in fields(CostModel)}
    except OSError as error:
        raise ConfigError(
            f"--profile {name} cannot be read ({error.strerror}); make it with staleflow profile"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--profile {name} holds no coefficients; make it with staleflow profile") from error
    if not all(math.isfinite(value) for value in values.values()) or values["floor"] + values["fixed"] <= 0:
        raise ConfigError(f"--profile {name}: a step that takes no time is impossible; measure again")
    return CostModel(**values)


def lengths(changes: Changes, source: Source) -> Source:
    """The preset's lengths, or those of a named distribution with the mean asked for."""
    kind, mean = changes.get("lengths"), changes.get("mean_tokens", 1500.0)
    if kind is None and "mean_tokens" in changes:
        raise ConfigError("mean_tokens needs a distribution; give lengths= too, or scale= to stretch the preset's")
    if isinstance(source, Sampled):
        between = changes.get("between", source.between)
        if kind is None:
            return replace(source, between=between)
        if kind not in DISTRIBUTIONS:
            raise ConfigError(f"lengths={kind} is unknown; choose one of {', '.join((*VARIANTS, *DISTRIBUTIONS))}")
        return replace(source, between=between, output=DISTRIBUTIONS[kind](mean))
    return source


DISTRIBUTIONS: dict[str, Callable[[float], Distribution]] = {
    "lognormal": lambda mean: Lognormal.from_mean(mean, 1.0),
    "powerlaw": lambda mean: PowerLaw(mean / 3, 1.5),
    "bimodal": lambda mean: Bimodal(mean / 2, 3 * mean, 0.2),
    "uniform": lambda mean: Uniform(1, max(1.0, 2 * mean - 1)),
}
"""Distributions of a given mean (before the cap), by the names that ``lengths=`` takes."""

LENGTHS: dict[str, type] = {"lengths": str, "mean_tokens": float, "between": float}

OWNERS = (Setting, Strategies, Workload)


def settable() -> dict[str, tuple[type, tuple[type, ...]]]:
    """Every key that an override may name: whose field it is, and the types its value may have."""
    found: dict[str, tuple[type, tuple[type, ...]]] = {key: (Sampled, (kind,)) for key, kind in LENGTHS.items()}
    found["policy"] = (NoneType, (str,))  # not a setting: the commands look at it themselves
    for owner in OWNERS:
        hints = get_type_hints(owner)
        for field in fields(owner):
            hint = hints[field.name]
            kinds = (str,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
            if field.name != "name" and all(kind in READ for kind in kinds):
                found[field.name] = (owner, kinds)
    return found


def read_overrides(texts: list[str]) -> Changes:
    changes: Changes = {}
    known = settable()
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not an option; write key=value, such as consume=batch")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            raise ConfigError(f"{key!r} is not a setting; {'did you mean' if close else 'known are'} {listed(close)}")
        if key in changes:
            raise ConfigError(f"{key} is given twice; give it once")
        changes[key] = convert(key, value, known[key][1])
    return changes


def listed(close: list[str]) -> str:
    return f"{' or '.join(close)}?" if close else ", ".join(sorted(settable()))


def convert(key: str, text: str, kinds: tuple[type, ...]) -> Any:
    for kind in kinds:
        try:
            return READ[kind][0](text)
        except ValueError:
            continue
    raise ConfigError(f"{key}={text} cannot be read; give {' or '.join(READ[kind][1] for kind in kinds)}")


def _whole(text: str) -> int:
    if abs(number := int(text)) > MOST:
        raise ValueError(text)
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _choice(words: Mapping[str, Any], text: str) -> Any:
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

READ: dict[type, tuple[Any, str]] = {
    bool: (lambda text: _choice(_SWITCH, text), "true or false"),
    int: (_whole, f"a whole number up to {MOST}"),
    float: (_finite, "a number"),
    str: (str, "a name"),
    NoneType: (lambda text: _choice({"none": None}, text), "none"),
}
"""How a value of each type is read, and what it is called."""


# The picture's file


def check_picture(name: str | None) -> Path | None:
    """Refuse a path that cannot become a picture before the run, not after it."""
    if name is None:
        return None
    path = Path(name)
    if path.suffix != ".svg":
        raise ConfigError(f"--picture {name} is not an SVG file; give a name that ends in .svg")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--picture {name} cannot be written; give a file in a folder that exists and is yours")
    return path


def write(path: Path, text: str) -> None:
    """All of it or nothing: readers never see half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
