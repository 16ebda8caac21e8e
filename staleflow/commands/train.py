"""``staleflow train``: the main job, on this machine.

staleflow train                                   the embedded default: minutes on two CPU cores
staleflow train laptop staleness=1 steps=40       a preset, or a file, with changes
staleflow train --resume runs/latest              continue where a run was stopped
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from staleflow import caller
from staleflow.commands.common import OWN_DEFAULT, Subparsers, add_settings, given_settings, typed
from staleflow.commands.dash import PORT, beside, check_port
from staleflow.config import (
    Config,
    ConfigError,
    Machine,
    differences,
    estimate,
    load,
    settled,
    this_machine,
)
from staleflow.config.checks import check
from staleflow.config.costs import costs_from_geometry
from staleflow.config.presets import LAPTOP
from staleflow.errors import INTERRUPTED
from staleflow.files import no_room
from staleflow.observe.marks import before_and_after
from staleflow.observe.output import Output, remark
from staleflow.reward.function import BAD_REWARD
from staleflow.reward.options import Reward
from staleflow.run.checkpoints import Choice, newest
from staleflow.run.continuing import continuing, stored_reward
from staleflow.run.directory import RunDirectory
from staleflow.run.environment import write_environment
from staleflow.run.fleet import simulated
from staleflow.run.processes import processes
from staleflow.run.resuming import outlook, prepared, resumable
from staleflow.runtime.local.supervisor import NO_ROOM, Supervisor, supervised
from staleflow.servers.database import JournalError
from staleflow.tasks.task import Problem

START = "reads the data"
TRIES = "reads the data and tries the reward"
"""The first thing that a run says: the second where it has a reward function to try."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model under a staleness bound",
        description="Train a model under a staleness bound: on one machine, or on the nodes of a Ray cluster "
        "(runtime=ray). "
        "Models: Llama, Mistral, Qwen2 and Qwen3 in Hugging Face format.",
        allow_abbrev=False,
    )
    add_settings(parser, OWN_DEFAULT)
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this directory")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan, the memory it needs, and the prompts that would be left out; train nothing",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, progress to standard error")
    parser.add_argument("--dash", action="store_true", help="show the run as a live page in the browser")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"of that page (default: {PORT})")
    parser.add_argument("--plain", action="store_true", help="one line per step instead of a live view")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Under a supervisor, which starts another control plane should this one die; not inside somebody's program."""
    check_port(options.port)
    if options.is_program and not options.dry_run:
        resumes = Path(options.resume) if options.resume else None
        return supervised(lambda supervisor: _begun(options, supervisor), resumes=resumes)
    return run_once(options)


def _begun(options: argparse.Namespace, supervisor: Supervisor) -> int:
    try:
        return run_once(options, supervisor)
    except (OSError, JournalError) as error:
        if supervisor.told and no_room(error):
            return NO_ROOM
        raise


def run_once(options: argparse.Namespace, supervisor: Supervisor | None = None) -> int:
    wanted = given_settings(options)
    before = supervisor.run if supervisor is not None else None
    if options.resume and not (supervisor is not None and supervisor.stored):
        directory, config = _resumed(Path(options.resume), wanted.source, wanted.words)
    elif before is not None:
        directory, config = RunDirectory.existing(before)
    else:
        directory, config = None, wanted.config()
    out = Output(sys.stderr if options.json else sys.stdout)
    if directory is not None and before is None and not options.dry_run:
        ahead = outlook(directory, config)
        print(ahead.text(), file=out, flush=True)
        if ahead.finished:
            caller.tell(caller.RUN, str(directory.path))
            if options.json:
                print(json.dumps(json.loads(directory.summary.read_text())))
            return 0
    if before is None:
        machine = this_machine()
        there = None
        if directory is not None and any(processes(directory.path)):
            _, there = RunDirectory.existing(directory.path)
        joins = config.runtime == "ray" and bool(config.ray.joins)  # other machines have the room
        config, note = (config, "") if there or joins else settled(config, machine)
        if options.dry_run:
            dry_run(config, machine, options.json)
        check(config, machine, room=not joins, there=there)
        if note:
            remark(note)
    if options.dry_run:
        return 0
    with ExitStack() as held:
        choice = None
        if directory is not None:
            held.enter_context(directory.owned())
            choice = resumable(directory, config)
            if supervisor is not None and before is None:  # nothing is lost if this process dies while it loads
                supervisor.tell(directory.path)
            for note in choice.notes:
                remark(note)
        name = wanted.source or LAPTOP
        view = options.plain, options.json
        port = options.port if options.dash else None
        summary = train(config, directory, choice, held, name, *view, supervisor, port)
    if options.json:
        print(json.dumps(summary))
    return INTERRUPTED if summary["interrupted"] else 0


def train(
    config: Config,
    directory: RunDirectory | None,
    choice: Choice | None,
    held: ExitStack,
    name: str,
    plain: bool = False,
    quiet: bool = False,
    supervisor: Supervisor | None = None,
    port: int | None = None,
) -> dict[str, Any]:
    """Everything heavy happens in here. ``held``: until when a new run directory is owned; ``port``: of its page."""
    from staleflow.tasks.opening import first_problem, model_folder, open_source, open_task

    if config.runtime == "local" and find_spec("torch") is None:  # only the processes of the run load it
        raise ConfigError("PyTorch is not installed: pip install 'staleflow[local]'")
    began = time.monotonic()
    out = Output(sys.stderr if quiet else sys.stdout)
    again = supervisor is not None and supervisor.run is not None

    def say(what: str) -> None:
        if not again:
            print(what, file=out, flush=True)

    tries = not again and config.environment.play is None
    say(TRIES if tries else START)
    source = open_source(config.data, config.seed)
    if tries:
        asyncio.run(try_reward(config.reward, first_problem(source)))
    say(f"loads the tokenizer of {config.model}")
    from staleflow.observe.terminal import TerminalView
    from staleflow.runtime.local.patience import run_patiently
    from staleflow.runtime.local.run import LocalRun
    from staleflow.runtime.local.status import status_of

    model = model_folder(config.model, config.cache, config.seed, lambda step, loss: _warming(step, loss, out))
    task = open_task(config.data, source, model, config.seed, config.evaluation.problems)
    checkpoint = None
    if directory is None or choice is None:
        directory = held.enter_context(RunDirectory.create(config, Path(name).stem).owned())
        write_environment(directory, ["staleflow", *sys.argv[1:]])
    else:
        checkpoint = prepared(directory, config, choice, task.fingerprint, model)
    caller.tell(caller.RUN, str(directory.path))
    say(f"run {directory.path}")
    if port is None:
        say(f"page: {typed()} dash {directory.path} shows it in a browser")
    say(f"data: {task.about()}")
    view = TerminalView(out, plain=plain)

    def show(run: LocalRun) -> None:
        status = status_of(run)
        view.update(status)
        if run.training:
            view.line(status)
        else:
            view.phase(status.doing)

    cost = costs_from_geometry(config)
    site = None
    if config.runtime == "ray":
        from staleflow.runtime.ray.site import RaySite

        site = RaySite(directory, config)
    run = LocalRun(config, directory, model, task, cost, checkpoint, show, view.note, supervisor, site)
    try:
        with beside(directory, port, out):
            summary = run_patiently(run.execute())
    finally:
        view.close()
    summary |= task.facts()
    by = caller.stopped_by(run.stopped_by)
    summary |= {"interrupted": run.interrupted, "stopped_by": by, "run": str(directory.path)}
    try:
        directory.write(directory.summary, summary)
    except OSError as error:  # a full disk; the checkpoint is there
        remark(f"{directory.summary} cannot be written ({error.strerror})")
    if not quiet:
        took = f"this command took {time.monotonic() - began:.0f} s, with start, evaluations and checkpoints"
        print(f"{summary_text(summary, directory)}\n{took}", file=out, flush=True)
    return summary


def dry_run(config: Config, machine: Machine, as_json: bool) -> None:
    """Print the plan, also of what does not fit and is then refused, and what of the data could be trained on."""
    from staleflow.tasks.opening import open_source, open_task, text_folder

    needs, facts = estimate(config, machine), None
    if not as_json:
        print(needs.text(), flush=True)
    if needs.problem is None:
        check(config, machine)
    about = f"not counted: the first run makes the tokenizer of {config.model}"
    if (folder := text_folder(config.model, config.cache)) is not None:
        source = open_source(config.data, config.seed)
        task = open_task(config.data, source, folder, config.seed, config.evaluation.problems)
        about, facts = task.about(), task.facts()
    print(json.dumps(needs.facts() | {"data": facts}) if as_json else f"\ndata: {about}")


async def try_reward(reward: Reward, problem: Problem) -> None:
    """Ask for one reward before anything heavy is loaded, and refuse a function that does not return a number.

    An exception is let pass: it may be about the empty response, and real ones are retried and reported.
    """
    from staleflow.reward.pool import RewardPool

    answers: asyncio.Queue[str] = asyncio.Queue()
    silent = os.open(os.devnull, os.O_WRONLY)  # a failure here may be about the empty response only
    pool = RewardPool(
        replace(reward, workers=1, patience_s=0.0),
        on_reward=lambda _name, _reward, _parts: answers.put_nowait(""),
        on_failure=lambda _name, why: answers.put_nowait(why),
        stderr=silent,
    )
    try:
        await pool.start()
        pool.submit("a try", problem)
        why = await answers.get()
    finally:
        await pool.close()
        os.close(silent)
    if why.startswith(BAD_REWARD):
        raise ConfigError(f"reward.function={', '.join(reward.functions)}: {why}")


def _warming(step: int, loss: float, out: Output) -> None:
    """The first run makes the base model."""
    if step == 0:
        print("making the base model by a short supervised warm start; it is kept for later runs", file=out)
    if step % 100 == 0:
        print(f"  step {step:4}, loss {loss:.3f}", file=out, flush=True)


def summary_text(summary: dict[str, Any], directory: RunDirectory) -> str:
    """The result in a few lines for people."""
    lines = [
        f"{summary['steps']} steps in {summary['wall_s']:.0f} s, {summary['trained_tokens_per_s']:,.0f} tokens/s; "
        f"staleness at most {summary['max_staleness']} of {summary['bound']}, {summary['violations']} violations",
        f"trainer idle {summary['trainer_idle']:.0%}, control plane {summary['control_overhead']:.1%} of one core, "
        f"{summary['tokens_wasted']:,} tokens wasted",
    ]
    if summary["accuracy_final"] is not None:
        lines.insert(0, f"held-out {_held_out(summary)}")
    if summary["seconds_to_90"] is not None:
        lines[0] += f" (90 % after {summary['seconds_to_90']:.0f} s)"
    if scaled := summary.get("scaled"):
        each = (f"{change['from']} -> {change['to']} at step {change['step']}" for change in scaled)
        lines.append(f"instances: {', '.join(each)}")
    for what in ("restarts", "failures"):
        if counts := summary.get(what):
            each = (f"{n} {name} ({why})" for name, reasons in counts.items() for why, n in reasons.items())
            lines.append(f"{what}: {', '.join(each)}")
    if summary["interrupted"]:
        by = summary.get("stopped_by") or "Ctrl-C"
        again = continuing(directory.path, stored_reward(directory.path))
        lines.append(f"stopped by {by}; continue with: {again}")
    if (best := summary.get("best")) and (directory.checkpoints / "best").is_dir():
        at = f"version {best['step']}, {best['figure']} {best['value']:.4g}"
        lines.append(f"best: {directory.checkpoints / 'best'} ({at})")
    lines.append(f"model: {newest(directory.checkpoints)}")
    return "\n".join(lines)


def _held_out(summary: dict[str, Any]) -> str:
    name, form = ("accuracy", ".1%") if summary["binary"] else ("mean reward", ".4g")
    return f"{name} {before_and_after(summary['accuracy'], summary['steps'], lambda value: f'{value:{form}}')}"


def _resumed(path: Path, source: str | None, changes: list[str]) -> tuple[RunDirectory, Config]:
    directory, before = RunDirectory.existing(path)
    if source is not None:
        raise ConfigError(f"--resume takes the settings from {path}: leave {source!r} out")
    if simulated(directory.fleet):
        raise ConfigError(f"{path} is a simulated run, of which nothing was trained: start a run by staleflow train")
    config = load(str(directory.config_file), changes)
    if changed := differences(before, config):
        why = f" (training.schedule={config.training.schedule} depends on them)" if "steps" in changed else ""
        model = newest(directory.checkpoints)
        other = f" from what it has learnt, by model={model}" if model is not None else ""
        raise ConfigError(
            f"the run in {path} was made with other settings of {', '.join(changed)}{why}: "
            f"leave them as they were, or start a new run{other}"
        )
    return directory, config
