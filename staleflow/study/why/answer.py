"""An answer: one sentence, and the facts behind it in the order in which a person would want them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

About = Literal["step", "instance", "trajectory", "group", "pace"]


@dataclass(frozen=True, slots=True)
class Answer:
    about: About
    sentence: str
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """By name, as JSON can hold them."""


def seconds(value: float) -> str:
    """Such as 0.35 s, 12.4 s, 1,240 s."""
    return f"{value:,.2f} s" if value < 1 else f"{value:,.1f} s" if value < 100 else f"{value:,.0f} s"


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def listed(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
