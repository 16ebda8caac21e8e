"""``staleflow evaluate``: the held-out problems of a configuration, answered by an engine here or by any server.

staleflow evaluate runs/latest/config.yaml model=runs/latest/checkpoints/best
staleflow evaluate run.yaml --server http://localhost:8000/v1                       # OpenAI-compatible
staleflow evaluate run.yaml --server http://localhost:8000/inference/v1/generate    # tokens in, tokens out

Prompts are tokens of CONFIG's model, so a server must have a model with the same tokenizer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from staleflow.commands.common import OWN_DEFAULT, Subparsers, add_settings, given_settings
from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.observe.progress import Progress
from staleflow.rollout.engine import Engine
from staleflow.rollout.options import ENGINES


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="mean reward on held-out problems, of a model or of a server",
        description="Let a model answer the held-out problems of CONFIG, and score its responses as a run would: by "
        "CONFIG's engine, or by a server that is not ours.",
        allow_abbrev=False,
    )
    add_settings(parser, OWN_DEFAULT)
    parser.add_argument("--server", metavar="URL", help="such as http://localhost:8000/v1")
    parser.add_argument("--served-model", metavar="NAME", help="its name on the server (default: the first there)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = given_settings(options).config()
    server: str | None = options.server
    if server is not None and not server.startswith(("http://", "https://")):
        raise ConfigError(f"--server {server} is not an address: write it as in http://localhost:8000/v1")
    if server is None and options.served_model is not None:
        raise ConfigError("--served-model names a model of a server: give --server too")
    if server is not None and config.environment.play is not None:
        raise ConfigError("--server only answers, and environment.play plays: leave one of them out")
    if server is None:
        ENGINES.check(config.rollout.engine, config.rollout.engine_arguments)
    with Progress("evaluate") as progress:
        found = evaluated(config, server, options.served_model, progress)
    print(json.dumps(found) if options.json else text_of(found))
    return 0


def evaluated(config: Config, server: str | None, served: str | None, progress: Progress) -> dict[str, Any]:
    from staleflow.reward.judge import Judge
    from staleflow.tasks.opening import decoder_of, model_folder, open_source, open_task, was_cut
    from staleflow.workers.evaluator import figures, judged, respond
    from staleflow.workers.playing import played_by

    progress.say(f"reads the data and the model {config.model}")
    source = open_source(config.data, config.seed)
    folder = model_folder(config.model, config.cache, config.seed)
    task = open_task(config.data, source, folder, config.seed, config.evaluation.problems)
    samples, sampling = config.evaluation.samples, config.evaluation_sampling(task.stop_tokens)
    by = f"{config.model} in {config.rollout.engine}"
    if config.environment.play is not None:
        play = played_by(_engine(config, folder), config.environment, task, folder)
        score = partial(play, task.held_out, samples, sampling, lambda: None)
    else:
        cut = was_cut(task, config.rollout.stop_strings)
        judge = Judge(config.reward, decoder_of(config.data, folder), cut, on_away=progress.say)
        if server is not None:
            answer, by = _server(server, folder, served)
        else:
            answer = partial(respond, _engine(config, folder))
        score = partial(judged, answer, task.held_out, samples, sampling, judge, lambda: None)
    progress.say(f"{len(task.held_out)} problems for {by}")
    began = time.monotonic()
    scored, failures = score()
    if not scored:
        raise ConfigError(f"no response could be scored ({failures[-1] if failures else 'there was none'})")
    return {
        "by": by,
        "problems": len(task.held_out),
        "responses": len(scored) + len(failures),
        "not_scored": len(failures),
        "figures": figures(scored, config.reward.names),
        "seconds": time.monotonic() - began,
    }


def _server(url: str, folder: Path, served: str | None) -> tuple[Callable[..., Any], str]:
    from staleflow.rollout.server import Server

    server = Server(url, folder, served)
    return server.respond, url if server.model is None else f"{server.model} at {url}"


def _engine(config: Config, folder: Path) -> Engine:
    from staleflow.rollout.making import make_engine

    return make_engine(config.rollout.engine, folder, config.engine_options(), config.rollout.engine_arguments)


def text_of(found: dict[str, Any]) -> str:
    figures = ", ".join(f"{name} {value:.4f}" for name, value in found["figures"].items())
    lost = f", {found['not_scored']} not scored" if found["not_scored"] else ""
    return f"{found['by']}: {figures} ({found['responses']} responses to {found['problems']} problems{lost})"
