"""A question in plain words, and what it is about.

parse("why is step 12 waiting")        # Question("step", "12")
parse("why did instance 3 pull")       # Question("instance", "i3")
parse("p373/2"), parse("group 17")     # Question("trajectory", "p373/2"), Question("group", "p17")
parse("")                              # Question("pace"): why is this run slower than the law allows
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from staleflow.errors import ConfigError
from staleflow.study.why.answer import About

EXAMPLES = '"step 12", "instance 3", "trajectory p17/2", "group p17", or nothing: why the run is not faster'
_FORMS: tuple[tuple[About, str], ...] = (
    ("trajectory", r"\b(?:trajectory|response|member)?\s*#?(p?\d+(?:\.\d+)?/\d+)\b"),
    ("step", r"\b(?:step|batch)\s*#?(\d+)\b"),
    ("instance", r"\b(?:instance|engine|rollout|replica)\s*#?(i?\d+)\b|\b(i\d+)\b"),
    ("group", r"\b(?:group|prompt)\s*#?(p?\d+(?:\.\d+)?)\b|\b(p\d+(?:\.\d+)?)\b"),
)
_PACE = re.compile(r"\b(slow|slower|fast|faster|speed|pace|law|bound|idle|bottleneck|throughput|binds?)\b")


@dataclass(frozen=True, slots=True)
class Question:
    about: About
    name: str = ""
    """Of the step, instance, trajectory or group, as the run names it."""


def parse(text: str) -> Question:
    """``ConfigError`` if it is about nothing that is known."""
    words = text.strip().lower()
    for about, form in _FORMS:
        if found := re.search(form, words):
            name = next(each for each in found.groups() if each)
            mark = {"trajectory": "p", "group": "p", "instance": "i"}.get(about, "")
            return Question(about, name if name.startswith(mark) else f"{mark}{name}")
    if re.search(r"\bstep\b", words):
        return Question("step", "now")
    if not words or words == "why" or _PACE.search(words):
        return Question("pace")
    raise ConfigError(f"{text!r} is not a question that can be answered: ask about {EXAMPLES}")
