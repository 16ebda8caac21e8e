"""``staleflow samples``: prompts, responses and rewards of a run, worst and best first.

staleflow samples runs/latest                   of the latest step
staleflow samples runs/latest --step 12 --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from staleflow.commands.common import Subparsers, add_run
from staleflow.errors import ConfigError
from staleflow.run.directory import RunDirectory

if TYPE_CHECKING:
    from staleflow.run.samples import Sample


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("samples", help="show prompts, responses and rewards of a run", allow_abbrev=False)
    add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="of this step (default: the latest)")
    parser.add_argument("--all", action="store_true", help="of all steps")
    parser.add_argument("--count", type=int, default=8, metavar="N", help="at most this many (default: 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    chosen = choose(options)
    if options.json:
        for each in chosen:
            print(json.dumps(msgspec.to_builtins(each)))
    else:
        print("\n\n".join(text_of(each) for each in chosen))
    return 0


def choose(options: argparse.Namespace) -> list[Sample]:
    """Worst and best in turn, from both ends."""
    from staleflow.run.samples import read_samples

    if options.count < 1:
        raise ConfigError(f"--count {options.count} is impossible: give 1 or more")
    if options.all and options.step is not None:
        raise ConfigError("--all and --step are both given: leave one out")
    directory, _ = RunDirectory.existing(Path(options.directory))
    found = list(read_samples(directory.samples))
    if not found:
        raise ConfigError(f"{options.directory} has no samples: wait for its first step, or give samples=4 to a run")
    step = found[-1].step if options.step is None else options.step
    here = found if options.all else [each for each in found if each.step == step]
    if not here:
        steps = f"{min(each.step for each in found)} to {max(each.step for each in found)}"
        raise ConfigError(f"{options.directory} has no samples of step {step}: give one of {steps}")
    ranked = sorted(here, key=lambda each: each.reward)
    in_turn = [ranked[at // 2] if at % 2 == 0 else ranked[-1 - at // 2] for at in range(len(ranked))]
    return in_turn[: options.count]


def text_of(sample: Sample) -> str:
    parts = "".join(f", {name} {value:.4g}" for name, value in sample.rewards.items())
    runs = sample.versions
    if played := any(version < 0 for version, _ in runs):  # many turns, few versions
        runs = [(each, sum(count for version, count in runs if version == each)) for each in sorted(dict(runs))]
    ages = ", ".join(f"{count} of version {version}" if version >= 0 else f"{count} given" for version, count in runs)
    head = f"step {sample.step}  {sample.name}  reward {sample.reward:.4g}{parts}  {sample.tokens} tokens ({ages})"
    cut = "  CUT" if sample.cut else ""
    said = _turns(sample) if played else _indented("  ", sample.response)
    return "\n".join([head + cut, *_indented("> ", _prompt(sample)), *said])


def _turns(sample: Sample) -> list[str]:
    """What was given begins with <, what the model made does not."""
    lines: list[str] = []
    begin = 0
    for (version, _), end in zip(sample.versions, sample.ends, strict=False):
        if text := sample.response[begin:end]:
            lines += _indented("< " if version < 0 else "  ", text)
        begin = end
    return lines


def _prompt(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in sample.prompt)


def _indented(mark: str, text: str) -> Sequence[str]:
    """Without what would move the cursor: a model writes anything."""
    return [mark + "".join(c if c.isprintable() else " " for c in line) for line in text.splitlines() or [""]]
