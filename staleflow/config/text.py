"""YAML as people mean it: ``1e-4`` is a number, ``off`` and ``no`` are texts, a key given twice is a mistake.

PyYAML reads YAML 1.1, where the opposite holds. Its rules for plain scalars are replaced, for reading and for writing:
what is written is read back equal::

    parse("learning_rate: 1e-4")                # {"learning_rate": 0.0001}
    parse(render({"migration": "off"}))         # {"migration": "off"}
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
)
RESOLVERS: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
for _tag, _pattern, _first in SCALARS:
    for _letter in _first:
        RESOLVERS.setdefault("" if _letter == "\0" else _letter, []).append((_tag, re.compile(f"^(?:{_pattern})$")))

LINE_ENDS = re.compile("[\x85\u2028\u2029]")
MISREAD = re.compile(r"^(?:y|n|yes|no|on|off)$", re.IGNORECASE)
OTHERS = {letter: [*RESOLVERS.get(letter, []), (SCALARS[0][0], MISREAD)] for letter in "yYnNoO"}
"""Words that a reader of YAML 1.1 takes for true or false: written in quotes."""


MOST_VALUES = 100_000
"""Most values of a configuration; a usual one has some dozens."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = RESOLVERS

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = RESOLVERS | OTHERS

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """In double quotes, with an escape, if a character could be read as the end of a line."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if LINE_ENDS.search(data) else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def parse(text: str) -> Any:
    """The value of a YAML text. ``ValueError``, in one line with the place, if it is not YAML."""
    try:
        loader = _Loader(text)
        if (node := loader.get_single_node()) is None:
            return None
        _written_out(node, {})
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("values are nested too deeply: write them flat") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ValueError(where + one_line(getattr(error, "problem", None) or error)) from None


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values the node has with every alias expanded. A few lines of aliases can stand for any number."""
    if (size := known.get(id(node))) == 0:
        raise ValueError("a value contains itself: write it out, without an alias")
    if size is None:
        known[id(node)] = 0
        inside = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for each in inside for part in (each if isinstance(each, tuple) else (each,)))
        size = known[id(node)] = 1 + sum(_written_out(each, known) for each in parts)
        if size > MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_VALUES:,} values: write out what is meant")
    return size


def render(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def one_line(text: object) -> str:
    """What a terminal would obey instead of showing it is written as in Python: a name may bring it along."""
    line = " ".join(str(text).split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def short(value: Any) -> str:
    """The value as a person would write it, on one line of at most 60 characters."""
    text = render(value) if isinstance(value, str | int | float | bool | None) else render_flow(value)
    text = one_line(text.removesuffix("...\n"))
    return text if len(text) <= 60 else text[:57] + "..."


def render_flow(value: Any) -> str:
    """The value on one line, as it is written after an equals sign."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").removesuffix("\n")
