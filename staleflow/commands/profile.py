"""``staleflow profile``: measure the engine on this machine and store the cost model that fits it.

staleflow profile                                  # a tiny model, seconds
staleflow profile models/mine --device cuda --dtype bfloat16 --output mine.json --picture mine.svg
staleflow simulate --profile mine.json             # plan with what was measured
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.rollout.shapes import SHAPES, write

if TYPE_CHECKING:
    from staleflow.rollout.profile import Profile

    Subparsers = argparse._SubParsersAction[Any]  # pyright: ignore[reportPrivateUsage]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, told apart with any colour vision."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's engine and fit the cost model",
        description="Measure decoding steps over a grid of sequences and context, and fit the cost model to them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="tiny",
        help=f"a model folder in Hugging Face format, or a shape with random weights: {', '.join(SHAPES)}",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--running", type=int, default=64, metavar="N", help="most sequences (default: 64)")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="most tokens of each (default: 1024)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of PyTorch (default: 1)")
    parser.add_argument("--output", metavar="FILE.json", default="profile.json", help="default: profile.json")
    parser.add_argument("--picture", metavar="FILE.svg", help="points and fit, drawn; default: beside the output")
    parser.add_argument("--json", action="store_true", help="print the file instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        from staleflow.rollout.builtin import EngineOptions, TorchEngine
        from staleflow.rollout.engine import EngineError
        from staleflow.rollout.profile import Grid, measure
    except ModuleNotFoundError as error:
        return _refuse(f"{error.name} is not installed: pip install 'staleflow[local]'")
    for name in ("running", "context", "threads"):
        if getattr(options, name) < 1:
            return _refuse(f"--{name} is {getattr(options, name)}: give at least 1")
    picture = options.picture or str(Path(options.output).with_suffix(".svg"))
    for path in (options.output, picture):
        if not Path(path).absolute().parent.is_dir():
            return _refuse(f"cannot write {path}: its folder does not exist, make it first")
    named = options.model in SHAPES
    if not named and not Path(options.model).is_dir():
        return _refuse(f"{options.model} is neither a folder nor one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as made:
        if named:
            write(options.model, made)
        try:
            engine = TorchEngine(
                made if named else options.model,
                EngineOptions(
                    kv_tokens=int(options.running * (options.context + 64) * 1.2),
                    max_running=options.running,
                    prefill_tokens=min(2048, options.context),
                    dtype=options.dtype,
                    device=options.device,
                    threads=options.threads,
                    weights="random" if named else "checkpoint",
                ),
            )
            show = sys.stderr.isatty() and not options.json
            profile = measure(engine, Grid.up_to(options.running, options.context), _tell if show else lambda _: None)
        except (EngineError, ValueError) as error:
            return _refuse(str(error))
    values = {
        "model": options.model,
        "device": engine.described,
        "dtype": options.dtype,
        "threads": options.threads,
        "date": time.strftime("%Y-%m-%d"),
        **profile.as_values(),
    }
    text = json.dumps(values, indent=2)
    Path(options.output).write_text(text + "\n")
    Path(picture).write_text(draw(profile, f"{options.model} on {engine.described}, {options.dtype}"))
    print(text if options.json else f"{table(profile)}\nstored in {options.output}, drawn in {picture}")
    return 0


def _refuse(message: str) -> int:
    print(f"staleflow: error: {message}", file=sys.stderr)
    return 2


def _tell(progress: str) -> None:
    print(f"\r{progress}   ", end="", file=sys.stderr, flush=True)


def table(profile: Profile) -> str:
    model, errors = profile.model, profile.errors
    lines = [f"{'running':>8}{'context':>10}{'measured ms':>13}{'fitted ms':>11}{'off':>8}"]
    for point in profile.points:
        fitted = model.step(point.running, point.context)
        lines.append(
            f"{point.running:8}{point.context:10}{1e3 * point.seconds:13.3f}{1e3 * fitted:11.3f}"
            f"{100 * (fitted / point.seconds - 1):7.1f}%"
        )
    lines += [
        "",
        f"a step with n sequences and c tokens of context: max({model.floor:.3g}, {model.base:.3g} + "
        f"{model.per_sequence:.3g} n) + {model.per_context_token:.3g} c seconds; prefill {model.per_prefill_token:.3g} "
        "a token",
        f"mean error {100 * errors.mean:.1f} %, worst {100 * errors.worst:.1f} %, of points left out of the fit "
        f"{100 * errors.unseen:.1f} %",
    ]
    return "\n".join(lines)


def draw(profile: Profile, title: str) -> str:
    """Step time against sequences, a line for each context: points measured, lines fitted. Both axes logarithmic."""
    from math import log10

    width, height, left, bottom, top = 720, 440, 70, 50, 40
    points = profile.points
    groups: dict[int, list[Any]] = {}
    for point in points:
        groups.setdefault(round(point.context / point.running), []).append(point)
    xs = [log10(point.running) for point in points]
    times = [log10(1e3 * point.seconds) for point in points]
    low, high = min(times) - 0.1, max(times) + 0.1

    def at(running: float, seconds: float) -> str:
        x = left + (log10(running) - min(xs)) / (max(xs) - min(xs)) * (width - left - 160)
        y = height - bottom - (log10(1e3 * seconds) - low) / (high - low) * (height - bottom - top)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{title}: decoding step, measured (dots) and fitted (lines)</text>',
    ]
    for running in sorted({point.running for point in points}):
        x = at(running, 10**low / 1e3).partition(",")[0]
        parts.append(f'<text x="{x}" y="{height - 28}" text-anchor="middle">{running}</text>')
    for tick in _ticks(low, high):
        y = at(points[0].running, tick / 1e3).partition(",")[2]
        parts.append(f'<line x1="{left}" x2="{width - 160}" y1="{y}" y2="{y}" stroke="#DDD"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:g} ms</text>')
    parts.append(f'<text x="{(width - 90) // 2}" y="{height - 8}" text-anchor="middle">sequences</text>')
    for number, (context, group) in enumerate(sorted(groups.items())):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(at(p.running, profile.model.step(p.running, p.context)) for p in group)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for point in group:
            x, _, y = at(point.running, point.seconds).partition(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
        y = top + 20 + 18 * number
        parts.append(f'<text x="{width - 150}" y="{y}" fill="{colour}">{context} tokens each</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    ticks = [10.0**power * digit for power in range(-3, 6) for digit in (1, 2, 5)]
    return [tick for tick in ticks if 10**low <= tick <= 10**high]
