"""Where a configuration comes from: a preset, a file, and ``key=value`` on the command line, in this order.

A file is YAML or TOML. It may name the preset that it changes (``preset: one-gpu``). Otherwise the embedded model
starts from ``laptop`` and any other from the plain defaults. If a name is given twice, the last counts::

    load(None, ["staleness=1", "training.learning_rate=1e-4"])
    load("one-gpu", ["model=models/qwen", "data.source=train.jsonl"])
    load("run.yaml", [])
"""

import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from staleflow.config.convert import SECTIONS, full_name, to_config, to_tree, type_of, unknown, wanted
from staleflow.config.presets import LAPTOP, PLAIN, PRESETS, Tree
from staleflow.config.schema import Config
from staleflow.config.text import one_line, parse, render, short
from staleflow.errors import ConfigError
from staleflow.settings import TEXT

ENDINGS = (".yaml", ".yml", ".toml")
OF_SOURCE = ("source", "arguments", "held_out", "held_out_count")
"""Settings of ``data`` that belong to one source."""


def load(
    name_or_path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = (), default: str = LAPTOP
) -> Config:
    """The configuration of a run; ``default`` is the preset if none is named.

    ``ConfigError``, in one line, if anything is wrong. Nothing heavy is imported.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    try:
        return _loaded(None if name_or_path is None else fs_path(name_or_path, "the configuration"), overrides, default)
    except ConfigError as error:
        raise ConfigError(one_line(error)) from None
    except UnicodeEncodeError as error:
        raise ConfigError(f"{error.object}{TEXT.problem(error.object)}") from None
    except RecursionError:
        raise ConfigError("values are nested too deeply: write them flat") from None


def fs_path(given: Any, what: str) -> str:
    """As ``os.fspath``; what a program gives instead is refused."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{what} is a {type(given).__name__}: give a name or a path")
    return str(os.fspath(given))


def _loaded(source: str | None, overrides: Sequence[str], default: str) -> Config:
    name, given = (source, {}) if source in PRESETS else (None, _file(source) if source is not None else {})
    name = given.pop("preset", None) or name
    if name is None:
        name = default if source is None else LAPTOP
        model = PRESETS[name]["model"]
        name = name if _with(given, overrides).get("model", model) == model else PLAIN
    try:
        return to_config(_with(_merged(_preset(name), given), overrides))
    except ConfigError as error:
        in_file = source is not None and source not in PRESETS and not overrides
        raise ConfigError(f"{source}: {error}" if in_file else str(error)) from None


def to_yaml(config: Config) -> str:
    """The whole configuration, as a file that ``load`` reads back equal."""
    return render(to_tree(config))


def _preset(name: Any) -> Tree:
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset {short(name)} is unknown: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def is_settings_file(source: str) -> bool:
    path = Path(source)
    return path.suffix.lower() in ENDINGS and path.is_file()


def _file(source: str) -> Tree:
    path = Path(source)
    if not is_settings_file(source):
        raise ConfigError(_not_there(source, path))
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = msgspec.to_builtins(tomllib.loads(text) if path.suffix.lower() == ".toml" else parse(text))
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{source} cannot be read ({error}): correct it there") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} holds {short(tree)}: write settings such as staleness: 1")
    return _nested(tree)


def _not_there(source: str, path: Path) -> str:
    if path.suffix.lower() in ENDINGS:
        return f"{source}: no such file: correct the path, or name a preset: {', '.join(PRESETS)}"
    if "=" in source:
        return f"{source} is not a file: settings come after it, as in: laptop {source}"
    if path.exists():
        return f"{source}: its ending is not known: name a .yaml or .toml file"
    near = difflib.get_close_matches(source, PRESETS, n=1)
    hint = f"write {near[0]}" if near else f"choose one of {', '.join(PRESETS)}, or name a .yaml or .toml file"
    return f"preset {source} is unknown: {hint}"


def _nested(tree: Tree) -> Tree:
    """Dotted keys of a file are paths, as on the command line."""
    nested: Tree = {}
    for key, value in tree.items():
        if "." in str(key):
            _put(nested, str(key), value)
        elif key in SECTIONS and (value is None or isinstance(value, dict)):
            nested[key] = {**nested.get(key, {}), **(value or {})}  # a section may be empty
        else:
            nested[str(key)] = value
    return nested


def _with(tree: Tree, overrides: Sequence[str]) -> Tree:
    changed: Tree = {}
    tree = dict(tree)
    for each in overrides:
        key, value = _override(each)
        changed[key] = value
        if key == "data.source":
            tree["data"] = _without_source(tree.get("data"), value)
    for key, value in changed.items():
        _put(tree, key, value)
    return tree


def _without_source(data: Any, source: Any) -> Any:
    """The section ``data`` without the settings that belong to another source."""
    if not isinstance(data, dict) or data.get("source", source) == source:
        return data
    return {key: value for key, value in data.items() if key not in OF_SOURCE}


def _override(text: Any) -> tuple[str, Any]:
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is not a setting: write key=value, such as 'staleness=1'")
    key, equals, value = text.partition("=")
    key = full_name(key.strip())
    if not equals or not key:
        raise ConfigError(f"{text} is not a setting: write key=value, such as staleness=1")
    if key == "preset":
        raise ConfigError(f"{text}: name the preset before the settings, without preset=")
    if key in SECTIONS:
        raise ConfigError(f"{text}: {key} is a group of settings: write {key}.NAME=value")
    try:
        parsed = parse(value)
    except ValueError:
        parsed = value  # a text with a colon or a brace in it
    return key, parsed


def _put(tree: Tree, dotted: str, value: Any) -> None:
    """Set one setting. Beyond its name, the path continues inside its value: ``data.arguments.digits``."""
    section, *rest = dotted.split(".")
    if section not in SECTIONS:
        if rest[1:] or (rest and "dict" not in str(get_type_hints(Config).get(section))):
            raise ConfigError(unknown(dotted))
        tree[section] = {**_copy(tree, section, dotted), rest[0]: value} if rest else _as_text(section, value)
        return
    name, *inside = rest
    kind = type_of(f"{section}.{name}")
    place = tree[section] = _copy(tree, section, dotted)
    if not inside:
        place[name] = _as_text(f"{section}.{name}", value)
        return
    if "dict" not in str(kind):
        raise ConfigError(f"{dotted} is unknown: {section}.{name} is {wanted(kind)}")
    for part in (name, *inside[:-1]):
        place[part] = _copy(place, part, dotted)
        place = place[part]
    place[inside[-1]] = value


def _copy(place: Tree, name: str, dotted: str) -> Tree:
    found = place.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{dotted} is given, and {name}={short(found)} too: leave one out")
    return dict(found)


def _as_text(dotted: str, value: Any) -> Any:
    """A number as text where the setting is a text: a folder may be called 7."""
    return str(value) if type_of(dotted) in (str, str | None) and type(value) in (int, float) else value


def _merged(base: Tree, given: Tree) -> Tree:
    """``given`` over ``base``: sections setting by setting, everything else as a whole."""
    merged = dict(base)
    for key, value in given.items():
        before = base.get(key, {})
        if key == "data" and isinstance(value, dict) and "source" in value:
            before = _without_source(before, value["source"])
        merged[key] = {**before, **value} if key in SECTIONS and isinstance(value, dict) else value
    return merged
