"""Parts that a setting names: the built-in ones by name, the user's own as ``module:function`` or ``module:Class``.

A new built-in is one function and one line in its registry. Targets are texts, so that names can be listed and checked
without importing anything::

    LOSSES = Registry("training.loss", {"dapo": Entry("staleflow.training.losses:dapo")}, takes=("logprobs_T", ...))
    LOSSES.problem("dapoo")             # ": write dapo"
    LOSSES.load("dapo")                 # the function
    LOSSES.load("my_module:loss")       # the user's own; the current folder is searched too

A name that ends in ``:`` or ``/`` stands for everything that begins with it, one that begins with a dot for files of
that ending. A registry may have its own kind of entry with further fields; a user's function may set them as
attributes.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from staleflow.errors import ConfigError, line_of


@dataclass(frozen=True, slots=True)
class Entry:
    target: str
    """``module:function``."""
    needs: str | None = None
    """A module of an optional package that it needs."""
    arguments: bool = False
    """Whether a built-in takes the mapping of arguments too, as the user's own functions do."""
    listed: bool = True
    """Whether people may write it."""
    install: str | None = None
    """How it is installed, if not by the module's name."""


AnEntry = TypeVar("AnEntry", bound=Entry)


def entries_of(module: str, *names: str) -> dict[str, Entry]:
    """Functions of a module under their own names."""
    return {name: Entry(f"{module}:{name}") for name in names}


class Registry(Generic[AnEntry]):
    all: ClassVar[list["Registry[Any]"]] = []

    def __init__(
        self,
        setting: str,
        entries: Mapping[str, AnEntry],
        takes: Sequence[str],
        arguments: str | None = None,
        own: str = "module:function",
        foreign: Mapping[str, str] | None = None,
    ) -> None:
        """``takes``: the positional arguments of every function. ``arguments``: the setting with further arguments for
        the user's own; None: ``..._arguments``. ``own``: how the user's own is written. ``foreign``: parameters that
        only functions for another library have, each with what to say of it."""
        self.setting = setting
        self.arguments = arguments or f"{setting.rpartition('.')[2]}_arguments"
        self.entries = dict(entries)
        self.takes = tuple(takes)
        self.own = own
        self.foreign = dict(foreign or {})
        self._kind = type(next(iter(self.entries.values()), cast(AnEntry, Entry(""))))
        self._loaded: dict[str, Callable[..., Any]] = {}
        Registry.all.append(self)

    def key(self, name: str) -> str | None:
        """The built-in that a value names; None: it is the user's own, or unknown."""
        if name in self.entries:
            return name
        prefix = (key for key in self.entries if key.endswith((":", "/")) and name.startswith(key))
        return next(prefix, None) or next((key for key in self.entries if key == Path(name).suffix.lower()), None)

    def problem(self, name: str) -> str | None:
        """The rest of the error after ``setting=name`` if there is no such entry. Imports nothing."""
        module, _, function = name.partition(":")
        if not name or (module and function) or self.key(name) is not None:  # one not given yet is refused by ``check``
            return None
        plain = [key for key in self.entries if not key.startswith(".") and not key.endswith((":", "/"))]
        near = difflib.get_close_matches(name, plain, n=1, cutoff=0.7)
        section = self.setting.rpartition(".")[0]
        beside = [each.setting for each in Registry.all if name in each.entries and each.setting.startswith(section)]
        meant = f" ({name} is for {beside[0]})" if beside else ""
        return f": write {near[0]}" if near and not meant else f": write one of {self.choices}{meant}"

    @property
    def choices(self) -> str:
        """The values that may be written, for people."""
        shown = [
            f"{key}..." if key.endswith((":", "/")) else key for key, entry in self.entries.items() if entry.listed
        ]
        shown = [f"a {key} file" if key.startswith(".") else key for key in shown]
        return f"{', '.join(shown)}, or {self.own}" if shown else self.own

    def takes_arguments(self, name: str) -> bool:
        """Whether this function takes the setting of arguments."""
        key = self.key(name)
        return key is None or self.entries[key].arguments

    def entry(self, name: str) -> AnEntry:
        """The entry of this name. The user's own function is imported for that, and its attributes are read."""
        key = self.key(name)
        if key is not None:
            return self.entries[key]
        function = self.load(name)
        traits = [each.name for each in fields(self._kind)[len(fields(Entry)) :]]
        return self._kind(name, **{trait: getattr(function, trait) for trait in traits if hasattr(function, trait)})

    def load(self, name: str) -> Callable[..., Any]:
        """The function, or ``ConfigError`` in one line."""
        if name not in self._loaded:
            if (problem := self.problem(name)) is not None or not name:
                raise ConfigError(f"{self.setting}={name}{problem or f': write one of {self.choices}'}")
            key = self.key(name)
            self._loaded[name] = self._import(name if key is None else self.entries[key].target, name)
        return self._loaded[name]

    def bound(self, name: str, settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """The function with its knobs: those of the settings that it has and that are given, and the arguments."""
        knobs = self.knobs(name)
        given = {knob: value for knob, value in settings.items() if value is not None and knob in knobs}
        return partial(self.load(name), **{**given, **arguments})

    def knobs(self, name: str) -> tuple[str, ...]:
        """The parameters beyond ``takes``. Those of a built-in are read from its source, so nothing is imported."""
        key = self.key(name)
        if key is not None:
            return _parameters_in_source(self.entries[key].target)[len(self.takes) :]
        return tuple(inspect.signature(self.load(name)).parameters)[len(self.takes) :]

    def check(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Refuse what cannot be used: a package that is missing, a function that cannot be imported or called."""
        key = self.key(name)
        if key is None:
            self.check_call(name, self.load(name), arguments)
        elif (needs := self.entries[key].needs) is not None and not _installed(needs):
            package = needs.replace("_", "-")
            how = self.entries[key].install or f"pip install {package}"
            raise ConfigError(f"{self.setting}={name} needs the package {package}: {how}")

    def check_call(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Refuse a function that cannot be called as it will be, or that is written for another library."""
        try:
            signature = inspect.signature(function)
        except ValueError:  # some of those written in C have none
            return
        wanted = ", ".join((*self.takes, *arguments))
        short = name.rpartition(":")[2]
        fix = f"write def __init__(self, {wanted})" if inspect.isclass(function) else f"write def {short}({wanted})"
        for parameter in self.foreign.keys() & signature.parameters.keys():
            raise ConfigError(f"{self.setting}={name} takes {parameter}, {self.foreign[parameter]}: {fix}")
        try:
            signature.bind(*self.takes, **arguments)
        except TypeError as error:
            raise ConfigError(f"{self.setting}={name} cannot be called as it will be ({error}): {fix}") from None

    def held(
        self,
        name: str,
        function: Callable[..., Any],
        check: Callable[..., None],
        spared: tuple[type[BaseException], ...] = (MemoryError,),
    ) -> Callable[..., Any]:
        """The function, whose mistakes are a ``ConfigError`` in one line if it is the user's own: what it raises, but
        for what is ``spared``, and what it returns. ``check`` is given the result, then what the function was given,
        and raises ``ValueError`` with what is wrong and what to return instead."""
        if self.key(name) is not None:
            return function

        @wraps(function)
        def called(*given: Any) -> Any:
            try:
                found = function(*given)
            except spared:
                raise
            except Exception as error:  # whatever the user's function raises
                raise ConfigError(self.failure(name, error, place_of(error, _file_of(function)))) from error
            try:
                check(found, *given)
            except ValueError as error:
                raise ConfigError(f"{self.setting}={name} returned {error}") from None
            return found

        return called

    def failure(self, name: str, error: Exception, place: str) -> str:
        """What is said of an error of the user's own function; ``place``: from ``place_of``."""
        return f"{self.setting}={name} failed ({line_of(error)}{place})"

    def _import(self, target: str, name: str) -> Callable[..., Any]:
        module, _, path = target.partition(":")
        if not {"", os.getcwd()} & set(sys.path):  # an installed command does not search the current folder
            sys.path.append(os.getcwd())
        try:
            found: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # whatever the user's module raises, a script that ends too
            raise ConfigError(
                f"{self.setting}={name}: importing {module} failed ({line_of(error)}): correct the name, or add its "
                "folder to PYTHONPATH"
            ) from None
        for part in path.split("."):
            if not hasattr(found, part):
                raise ConfigError(f"{self.setting}={name}: {module} has no {path}: correct the part after the colon")
            found = getattr(found, part)
        if not callable(found):
            wanted = self.own.partition(":")[2].lower()
            raise ConfigError(f"{self.setting}={name}: {path} is a {type(found).__name__}: name a {wanted}")
        return found


def place_of(error: Exception, *files: str | None) -> str:
    """The last line of these files that the error passed; empty if it passed none."""
    passed = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in files]
    return f" at {Path(passed[-1].filename).name}, line {passed[-1].lineno}" if passed else ""


def _file_of(function: Callable[..., Any]) -> str | None:
    while (inner := getattr(function, "func", None) or getattr(function, "__wrapped__", None)) is not None:
        function = inner
    if inspect.isclass(function):
        function = function.__init__
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is there, and was made by hand
        return True


def _parameters_in_source(target: str) -> tuple[str, ...]:
    module, _, name = target.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = (each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    found = next(each for each in functions if each.name == name)
    every = (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)
    return tuple(each.arg for each in every)
