"""``staleflow profile``: measure the engine on this machine and store the cost model that fits it.

staleflow profile                                  # a tiny model, seconds
staleflow profile run.yaml                         # the model, engine, device and sizes of a run
staleflow profile --engine vllm
staleflow profile models/mine --device cuda --dtype bfloat16 --output mine.json --picture mine.svg
staleflow simulate --profile mine.json             # plan with what was measured
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.commands.common import Subparsers, add_settings, check_output, given_settings
from staleflow.config import Config, load
from staleflow.config.sizes import sizes_of
from staleflow.errors import ConfigError
from staleflow.files import write_whole
from staleflow.observe.chart import HEIGHT, Curve, chart, document
from staleflow.observe.progress import Progress
from staleflow.rollout.options import ENGINES, EngineOptions
from staleflow.rollout.shapes import SHAPES, llama, write

if TYPE_CHECKING:
    from staleflow.rollout.fit import Profile

TINY = "tiny"
RUNNING, CONTEXT = 64, 1024


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's engine and fit the cost model",
        description="Measure decoding steps over a grid of sequences and context, and fit the cost model to them. "
        f"Instead of CONFIG, a model folder or a shape with random weights: {', '.join(SHAPES)} (default: {TINY}).",
        allow_abbrev=False,
    )
    add_settings(parser, TINY)
    parser.add_argument("--engine", help="builtin (default), vllm or module:Class")
    parser.add_argument("--device", help="cpu (default) or cuda")
    parser.add_argument("--dtype", help="float32 (default) or bfloat16")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: 1)")
    parser.add_argument("--running", type=int, metavar="N", help=f"most sequences (default: {RUNNING}, or CONFIG's)")
    parser.add_argument("--context", type=int, metavar="N", help=f"most tokens of each (default: {CONTEXT})")
    parser.add_argument("--output", metavar="FILE.json", default="profile.json", help="default: profile.json")
    parser.add_argument("--picture", metavar="FILE.svg", help="points and fit, drawn; default: beside the output")
    parser.add_argument("--json", action="store_true", help="print the file instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config, running, context = read(options)
    output = check_output("--output", options.output)
    picture = check_output("--picture", options.picture or str(output.with_suffix(".svg")))
    if output == picture:
        raise ConfigError(f"--output {output} is also the name of the picture: give one that ends in .json")
    with Progress("profile") as progress:
        profile, device = measure_engine(config, running, context, progress)
    values = {
        "model": config.model,
        "engine": config.rollout.engine,
        "device": device,
        "dtype": config.rollout.dtype,
        "threads": config.processes.threads or 1,
        "date": time.strftime("%Y-%m-%d"),
        **profile.as_values(),
    }
    text = json.dumps(values, indent=2)
    write_whole(output, text + "\n")
    write_whole(picture, draw(profile, f"{config.model} on {device}, {config.rollout.dtype}"))
    print(text if options.json else f"{table(profile)}\nstored in {output}, drawn in {picture}")
    return 0


def read(options: argparse.Namespace) -> tuple[Config, int, int]:
    """What to measure: the configuration, the most sequences and the most tokens of each."""
    for name in ("running", "context"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name} is {value}: give at least 1")
    models = [word for word in options.words if word in SHAPES or Path(word).is_dir()]
    options.words = [word if word not in models else f"model={word}" for word in options.words]
    wanted = given_settings(options)
    words = wanted.words if wanted.source or "model" in wanted.names else [f"model={TINY}", *wanted.words]
    config = load(wanted.source, words)
    rollout = config.rollout
    running = rollout.max_running if wanted.source else RUNNING
    context = config.longest_prompt + rollout.max_tokens if wanted.source else CONTEXT
    return config, options.running or running, options.context or context


def measure_engine(config: Config, running: int, context: int, progress: Progress) -> tuple[Profile, str]:
    """The profile, and a description of the device."""
    progress.say("loads PyTorch")
    try:
        from staleflow.rollout.making import make_engine
        from staleflow.rollout.profile import Grid, measure
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'staleflow[local]'") from None
    rollout, random = config.rollout, not Path(config.model).is_dir()
    ENGINES.check(rollout.engine, rollout.engine_arguments)
    options = EngineOptions(
        kv_tokens=int(running * (context + 64) * 1.2),
        max_running=running,
        prefill_tokens=min(2048, context),
        dtype=rollout.dtype,
        device=rollout.device,
        threads=config.processes.threads or 1,
        weights="random" if random else "checkpoint",
    )
    progress.say(f"loads {config.model}")
    with tempfile.TemporaryDirectory() as made:
        if random:
            write(_shape(config), made)
        engine = make_engine(rollout.engine, made if random else config.model, options, rollout.engine_arguments)
        try:
            progress.say(f"measures up to {running} sequences of up to {context} tokens")
            profile = measure(engine, options, Grid.up_to(running, context), progress.reach)
        finally:
            engine.close()
        return profile, getattr(engine, "described", rollout.device)


def _shape(config: Config) -> str | dict[str, Any]:
    """The shape of the model, for random weights, which take the same time."""
    if config.model in SHAPES:
        return config.model
    sizes = sizes_of(config)
    return llama(sizes.hidden, sizes.intermediate, sizes.layers, sizes.heads, sizes.kv_heads, sizes.vocabulary)


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

    def context(point: Any) -> int:
        return round(point.context / point.running)

    lines: list[Curve] = []
    for tokens, group in groupby(sorted(profile.points, key=context), context):
        points = list(group)
        fitted = [(each.running, 1e3 * profile.model.step(each.running, each.context), 0.0) for each in points]
        dots = [(each.running, 1e3 * each.seconds) for each in points]
        lines.append(Curve(f"{tokens:,} tokens each", fitted, dots=dots))
    title = f"{title}: milliseconds of a decoding step, measured (dots) and fitted (lines)"
    return document(chart(lines, title, "sequences", logarithmic=True), HEIGHT, title)
