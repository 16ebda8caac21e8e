"""``staleflow why``: why a run does what it does, in one sentence and the facts behind it.

staleflow why runs/latest                           what sets the pace, and which setting would help
staleflow why runs/latest step 12                   also: "why is step 12 waiting"
staleflow why runs/latest why did instance 3 pull
staleflow why runs/latest trajectory p17/2 --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.commands.common import Subparsers, add_run
from staleflow.run.directory import RunDirectory

TITLES = {
    "trainer_idle": "trainer idle, share of the time",
    "trainer_idle_s": "trainer idle in a step",
    "room": "room for groups, by version",
    "versions": "instances, by version",
}
"""Of facts whose names alone do not say what they are."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "why",
        help="say why a run waits, pulls, moves or releases something, or is not faster",
        description="Answers from what the run recorded: its events, decisions with their inputs, metrics and the load "
        "of its instances. Works while it runs and afterwards, and for simulated runs (staleflow simulate --record).",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument(
        "question",
        nargs="*",
        metavar="QUESTION",
        help='in plain words: "step 12", "why did instance 3 pull", "trajectory p17/2", "group p17"; none: why the run '
        "is slower than the law allows",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from staleflow.study.why import ask

    directory, config = RunDirectory.existing(Path(options.directory))
    text = " ".join(options.question)
    answer = ask(directory, config, text)
    if options.json:
        print(json.dumps({"question": text, "about": answer.about, "answer": answer.sentence, "facts": answer.facts}))
    else:
        print("\n".join([answer.sentence, "", *lines(answer.facts)]))
    return 0


def lines(facts: dict[str, Any], indent: str = "  ") -> Iterator[str]:
    """Facts below each other, their values aligned."""
    width = max((len(title(name)) for name in facts), default=0)
    for name, value in facts.items():
        label = f"{indent}{title(name):{width}}"
        if isinstance(value, dict) and value and any(isinstance(each, dict) for each in value.values()):
            yield label.rstrip()
            yield from lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield label.rstrip()
            yield from (f"{indent}  {shown(each)}" for each in value)
        else:
            yield f"{label}  {shown(value)}{unit(name, value)}"


def title(name: str) -> str:
    if name in TITLES:
        return TITLES[name]
    rate = name.removesuffix("_per_s")
    return (f"{rate} a second" if rate != name else name.removesuffix("_s")).replace("_", " ")


def unit(name: str, value: Any) -> str:
    seconds = name.endswith("_s") and not name.endswith("_per_s")
    return " s" if seconds and isinstance(value, int | float) else ""


def shown(value: Any) -> str:
    if isinstance(value, dict):
        colon = ":" if all(name.isdecimal() for name in value) else ""  # by version
        pairs = (f"{title(name)}{colon} {shown(each)}{unit(name, each)}" for name, each in value.items())
        return ", ".join(pairs) or "-"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None or value == "" else f"{value:,}" if isinstance(value, int) else str(value)
