"""The base of the configuration's sections: frozen dataclasses that refuse bad values when they are made.

The limits of a field are in its type; rules over several fields are in ``contradictions``::

    @dataclass(frozen=True)
    class Reward(Section):
        function: Annotated[str, REWARDS] = "adder"     # a registry: one of its names, or module:function
        workers: Count = 1
        timeout_s: Positive = 10.0

    Reward(workers=0)               # ConfigError: workers=0 is too low: give 1 or more

Every error is one line that begins with the field's name. Nothing heavy is imported here.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from staleflow.errors import ConfigError
from staleflow.registry import Registry

LARGEST = 2**53
"""Larger whole numbers do not survive every format they pass through."""

Other = TypeVar("Other")


@runtime_checkable
class Rule(Protocol):
    """A rule for the value of a field, in its type."""

    def problem(self, value: Any) -> str | None:
        """The rest of the error after ``name=value`` if the value is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Range:
    least: float | None = None
    most: float | None = None
    above: float | None = None
    infinite: bool = False
    """Whether .inf is allowed: it turns something off."""

    def problem(self, value: float) -> str | None:
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not self.infinite)):
            return " is not finite: give a number"
        if isinstance(value, int) and self.most is None and abs(value) > LARGEST:
            return f" is out of range: give at most {LARGEST}"
        if self.least is not None and value < self.least:
            return f" is too low: give {self.least:g} or more"
        if self.above is not None and value <= self.above:
            return f" is too low: give a number above {self.above:g}"
        if self.most is not None and value > self.most:
            return f" is too high: give at most {self.most:.15g}"
        return None


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[Any, ...]

    def problem(self, value: Any) -> str | None:
        return None if value in self.values else f": write one of {', '.join(map(str, self.values))}"


@dataclass(frozen=True, slots=True)
class Form:
    pattern: str
    fix: str

    def problem(self, value: str) -> str | None:
        return None if re.fullmatch(self.pattern, value) else f" is unknown: {self.fix}"


class Encodable:
    """Text that files of a run can hold. The name of a file need not be: Linux takes any bytes."""

    def problem(self, value: Any) -> str | None:
        try:
            str(value).encode()
        except UnicodeEncodeError:
            return " is not UTF-8: rename the file or folder, or write the text in UTF-8"
        return None


FINITE = Range()
TEXT = Encodable()
Whole = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
Amount = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(0, 1)]
Device = Annotated[str, Form(r"cpu|cuda(?::\d+)?", "give cpu, cuda or cuda:0")]


def numbered(device: str) -> str:
    """A GPU by its number: ``cuda`` is the first one."""
    return "cuda:0" if device == "cuda" else device


class Section:
    """A group of settings that validates itself."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for problem in chain(out_of_range(self), _unused_arguments(self), self.contradictions()):
            raise ConfigError(problem)

    def contradictions(self) -> Iterator[str]:
        """Rules over several fields that are broken, each in one line with the fix."""
        yield from ()

    def to(self, kind: type[Other], **more: Any) -> Other:
        """The fields that both kinds have, as the other kind, with more of its fields."""
        ours: Any = {each.name for each in fields(self)}  # pyright: ignore[reportArgumentType]
        theirs: Any = fields(kind)  # pyright: ignore[reportArgumentType]
        return kind(**({each.name: getattr(self, each.name) for each in theirs if each.name in ours} | more))


def out_of_range(section: Any) -> Iterator[str]:
    """Rules of single fields that are broken, each in one line with the fix."""
    for name, rules in _rules(type(section)):
        value: Any = getattr(section, name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is None:
                continue
            for rule in rules:
                if (problem := rule.problem(each)) is not None:
                    yield f"{name}={each}{problem}"


def registries(section: Any) -> Iterator[tuple[Registry[Any], str, dict[str, Any]]]:
    """For each field that names an entry of a registry: the registry, the name, and the arguments beside it."""
    for field, registry in _registries(type(section)):
        named, arguments = getattr(section, field), getattr(section, registry.arguments, {})  # not all have any
        for each in [named] if isinstance(named, str) else named or ():
            alone = isinstance(named, str) or len(named) == 1
            yield registry, each, arguments if alone else arguments.get(short_name(each), {})


def short_name(name: str) -> str:
    """Of one among several that a setting names: what its arguments are given by."""
    return name if "//" in name else name.rpartition(":")[2]


def several(setting: str, names: Sequence[str], arguments: Mapping[str, Any], of: str) -> Iterator[str]:
    """What is wrong with naming these at once; ``of``: the setting of their arguments."""
    if len(set(names)) < len(names):
        yield f"{setting} has two of the same name ({', '.join(names)}): name different ones"
    if len(names) > 1 and (strangers := [name for name in arguments if name not in names]):
        yield f"{of} has {strangers[0]}: with several, give them by name: {', '.join(names)}"


def _unused_arguments(section: Any) -> Iterator[str]:
    for registry, name, arguments in registries(section):
        if arguments and not registry.takes_arguments(name):
            yield (
                f"{registry.arguments} are for {registry.own}: leave them out with {registry.setting}={name}, whose "
                "settings have names"
            )


@cache
def _rules(kind: type) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """The rules of each field that has any. All numbers must be finite unless their type says otherwise."""
    hints = get_type_hints(kind, include_extras=True)
    rules = {each.name: tuple(_in(hints[each.name])) for each in fields(kind)}
    return tuple((name, found) for name, found in rules.items() if found)


@cache
def _registries(kind: type) -> tuple[tuple[str, Registry[Any]], ...]:
    return tuple((name, rule) for name, rules in _rules(kind) for rule in rules if isinstance(rule, Registry))


def _in(hint: Any) -> Iterator[Rule]:
    """The rules in a type and its parts."""
    if get_origin(hint) is Annotated:
        yield from (rule for rule in _in(hint.__origin__) if rule is TEXT)
        yield from (each for each in hint.__metadata__ if isinstance(each, Rule))
    elif get_origin(hint) is Literal:
        yield OneOf(get_args(hint))
    elif hint in (int, float):
        yield FINITE
    elif hint is str:
        yield TEXT
    elif get_origin(hint) in (tuple, Union, UnionType):
        yield from dict.fromkeys(rule for part in get_args(hint) for rule in _in(part))
