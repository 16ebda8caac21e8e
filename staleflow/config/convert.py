"""From a tree of plain values to a ``Config``, or an error that says which value is wrong and what to write.

::

    to_config({"staleness": 1, "rollout": {"instances": 3}})
    to_config({"rollout": {"instnces": 3}})     # ConfigError: rollout.instnces is unknown: write rollout.instances
    full_name("max_tokens")                     # rollout.max_tokens: a name that only one section has needs no section
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from staleflow.config.field_names import elsewhere
from staleflow.config.rules import refuse_values
from staleflow.config.schema import Config
from staleflow.config.text import one_line, short
from staleflow.errors import ConfigError

SECTIONS = {name: kind for name, kind in get_type_hints(Config).items() if dataclasses.is_dataclass(kind)}
"""The sections, by name."""
NAMES = [
    name
    for first, kind in get_type_hints(Config).items()
    for name in ([f"{first}.{each}" for each in get_type_hints(kind)] if first in SECTIONS else [first])
]
"""Dotted names of all settings."""
NEAR = 0.8
"""How alike two spellings are that may be one name: what shares a word with it is not what was meant."""
RENAMED = {
    "chunk": "rollout.prefill_tokens",
    "filter_uniform": "filter: write filter=no-signal, or filter=none",
    "policy": "the option --policy of simulate, or --policies of compare",
}
"""Former names of settings, and what to write now."""


def to_config(tree: Mapping[str, Any]) -> Config:
    """The configuration that the tree describes; what it leaves out has its default."""
    _refuse_unknown(tree)
    try:
        config = _at_home(msgspec.convert(tree, Config))
    except msgspec.ValidationError as error:
        raise ConfigError(_wrong_type(tree, error)) from None
    refuse_values(config)
    return config


def _at_home(config: Config) -> Config:
    """Expand paths that begin with ``~``: a shell does not do that after an equals sign."""
    return dataclasses.replace(
        _expanded(config, "model", "runs", "cache"),
        data=_expanded(config.data, "source", "held_out"),
        cluster=_expanded(config.cluster, "trace", "profile"),
    )


def _expanded(section: Any, *names: str) -> Any:
    given = {name: getattr(section, name) for name in names}
    return dataclasses.replace(section, **{name: value and os.path.expanduser(value) for name, value in given.items()})


def to_tree(config: Config) -> dict[str, Any]:
    """All settings as plain values."""
    return _plain(config)


def _plain(value: Any) -> Any:
    """``msgspec.to_builtins`` alone would leave out what a section made by ``msgspec.convert`` has by default."""
    if not dataclasses.is_dataclass(value):
        return msgspec.to_builtins(value)
    return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}


def leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of each setting."""
    for name, value in tree.items():
        if name in SECTIONS:
            yield from ((f"{name}.{key}", each) for key, each in value.items())
        else:
            yield name, value


def type_of(dotted: str) -> Any:
    """The type of a setting, or ``ConfigError`` with the name that was probably meant."""
    section, dot, name = dotted.partition(".")
    kind: Any = SECTIONS.get(section) if dot else Config
    hints = get_type_hints(kind) if kind is not None else {}
    if (name if dot else section) not in hints:
        raise ConfigError(unknown(dotted))
    return hints[name if dot else section]


def full_name(name: str) -> str:
    """The name with its section, which may be left out where only one section has a setting of this name."""
    found = [each for each in NAMES if each.endswith(f".{name}")]
    if "." in name or name in NAMES or not found:
        return name
    if len(found) > 1:
        raise ConfigError(f"{name} may be {' or '.join(found)}: write one of them")
    return found[0]


def unknown(dotted: str) -> str:
    if dotted in RENAMED:
        return f"{dotted} is now {RENAMED[dotted]}"
    if (hint := elsewhere(dotted)) is not None:
        return f"{dotted} is unknown: {hint}"
    section, dot, last = dotted.rpartition(".")
    if near := _near(dotted, NAMES if dot else [*SECTIONS, *NAMES]) or _near_last(section, last):
        return f"{dotted} is unknown: write {near}"
    section = dotted.partition(".")[0]
    here = get_type_hints(SECTIONS[section]) if section in SECTIONS else get_type_hints(Config)
    return f"{dotted} is unknown: choose one of {', '.join(here)}"


def _near(name: str, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=NEAR)), None)


def _near_last(section: str, last: str) -> str | None:
    """A setting whose name without its section is spelled nearly so, first of all in this section."""
    here = {each.rpartition(".")[2]: each for each in NAMES if each.startswith(f"{section}.")}
    anywhere = {each.rpartition(".")[2]: each for each in reversed(NAMES)}
    for names in (here, anywhere):
        if (near := _near(last, names)) is not None:
            return names[near]
    return None


def _refuse_unknown(tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        if name not in get_type_hints(Config):
            raise ConfigError(unknown(str(name)))
        if name not in SECTIONS:
            continue
        if not isinstance(value, Mapping):
            first = next(iter(get_type_hints(SECTIONS[name])))
            raise ConfigError(f"{name}={short(value)}: it is a group of settings: write {name}.{first} and the like")
        for key in value:
            type_of(f"{name}.{key}")


def _wrong_type(tree: Mapping[str, Any], error: msgspec.ValidationError) -> str:
    found = re.search(r"`\$((?:\.\w+)+)", str(error))
    if found is None:  # a check of a section's own
        return one_line(error)
    parts = found[1][1:].split(".")
    dotted = ".".join(parts[: 2 if parts[0] in SECTIONS else 1])
    if dotted in SECTIONS:  # the section itself has said what is wrong
        return f"{dotted}.{str(error).partition(' - at `')[0]}"
    value: Any = tree
    for part in dotted.split("."):
        value = value[part]
    return f"{dotted}={short(value)}: write {wanted(type_of(dotted))}"


def wanted(kind: Any) -> str:
    """What to write for a setting of this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return f"{wanted(next(each for each in arguments if each is not NoneType))}, or null"
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return "a list of texts such as [one, two]"
    if origin is tuple:
        return f"a list of {len(arguments)} numbers such as [0.5, 2]"
    if origin is dict:
        return "names and values such as {digits: 1}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text (in quotes if it is a number)",
    }
    return names[kind]
