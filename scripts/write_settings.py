"""Writes docs/settings.md: every setting with its default and what its source says of it.

python scripts/write_settings.py
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from staleflow.config.schema import Config
from staleflow.config.text import render_flow

TARGET = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
INTRODUCTION = """# Settings

Every setting of a run, with the default of the preset `plain`; [training](training.md#configuration) explains those to
know first. In a file, a section is a mapping; on a command line it is `section.name=value`. What is out of range is
refused with the range. `config.yaml` in the directory of a run has all of them as they were. Written by
`python scripts/write_settings.py` from the source.
"""


def page() -> str:
    sections = {each.name: made(each) for each in fields(Config) if is_dataclass(made(each))}
    parts = [INTRODUCTION, *table(Config, leave=tuple(sections))]
    for name, section in sections.items():
        parts += [f"## {name}\n", *table(type(section), f"{name}.")]
    return "\n".join(parts)


def table(kind: Any, prefix: str = "", leave: tuple[str, ...] = ()) -> Iterator[str]:
    said = {name: text for each in reversed(kind.__mro__) for name, text in documented(each).items()}
    hints = get_type_hints(kind)
    yield "| setting | default | |\n|---|---|---|"
    for each in fields(kind):
        if each.name not in leave:
            choices = get_args(hints[each.name]) if get_origin(hints[each.name]) is Literal else ()
            about = [said.get(each.name, ""), f"One of {', '.join(f'`{one}`' for one in choices)}." if choices else ""]
            yield f"| `{prefix}{each.name}` | {default(each)} | {' '.join(filter(None, about))} |"
    yield ""


def documented(kind: type) -> dict[str, str]:
    """The text below each field, in one line."""
    if not is_dataclass(kind):
        return {}
    [made_of] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(made_of, ast.ClassDef)
    found: dict[str, str] = {}
    for one, below in zip(made_of.body, made_of.body[1:], strict=False):
        match one, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.replace("``", "`").split()).replace("|", "\\|")
    return found


def made(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def default(field: Any) -> str:
    value = made(field)
    if field.default_factory is not MISSING and isinstance(value, str):
        return ""  # depends on the machine
    return f"`{render_flow(list(value) if isinstance(value, tuple) else value)}`" if value != "" else ""


if __name__ == "__main__":
    TARGET.write_text(page())
