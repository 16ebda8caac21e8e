"""``staleflow plan``: which bound, batch, length cap and split to train with, as tables, as JSON or as a picture.

What cannot be planned is refused in one line, with exit code 2, before anything runs or is written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from staleflow.commands.common import (
    LENGTHS,
    GivenSettings,
    Subparsers,
    add_jobs,
    add_simulated,
    check_jobs,
    check_picture,
    console,
    fitted,
    given_settings,
    read_setting,
    refuse_stuck,
    write_picture,
)
from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.observe.chart import HEIGHT, Curve, chart, document, stacked
from staleflow.observe.progress import Progress
from staleflow.simulate.setting import Setting, assumptions
from staleflow.study.law import Law, law, splits, work_of
from staleflow.study.measured import read_run
from staleflow.study.plan import Plan, Search, Trial, Turn, make_plan

MEANING = {
    "training": "the trainer is always busy, and another split would not help: only more GPUs in all, or fewer tokens",
    "rollout": "the fleet is always busy, and another split would not help: only more GPUs in all, or fewer tokens",
    "tail": "the longest responses set the pace: a larger bound or batch or a lower cap helps, more GPUs hardly",
}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="find bound, batch, length cap and split in the simulator",
        description="Search bound, batch size, length cap and GPU split in the simulator, and recommend one setting. "
        "The plan is for any number of GPUs and machines, and the answer says what staleflow train needs to use it.",
        allow_abbrev=False,
    )
    add_simulated(parser)
    defaults = Search()
    parser.add_argument("--run-dir", metavar="DIR", help="a finished run: plan with its measured lengths and costs")
    parser.add_argument(
        "--most-staleness", type=int, default=defaults.most_staleness, metavar="N", help="no larger bound (default: 3)"
    )
    parser.add_argument(
        "--most-groups", type=int, default=defaults.most_groups, metavar="N", help="no larger batch (default: 512)"
    )
    parser.add_argument(
        "--worth",
        type=float,
        default=100 * defaults.worth,
        metavar="PERCENT",
        help="turn a knob only for at least this much more throughput (default: 5)",
    )
    add_jobs(parser)
    parser.add_argument("--picture", metavar="FILE.svg", help="write throughput against bound and against split")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    path, search, wanted = check_picture(options.picture), read_search(options), given_settings(options)
    if options.run_dir:
        config, setting, notes = measured_setting(options, wanted)
    else:
        config, setting = read_setting(options, wanted)
        notes = assumptions(config, setting)
    if "steps" in wanted.names:
        search = replace(search, steps=setting.steps)
    jobs = check_jobs(options.jobs)
    on_cpu = config.rollout.device == "cpu"
    unit = "processes" if on_cpu else "GPUs"
    name = f"the run in {options.run_dir}" if options.run_dir else setting.name
    with refuse_stuck(), Progress("plan") as progress:
        progress.say(f"simulates {name} on {setting.gpus} {unit}")
        plan = make_plan(setting, search, progress.say, jobs, progress.reach)
    if path:
        write_picture(path, draw(plan))
    why_not = cannot_train(plan.best.setting, on_cpu, options.nodes or 1)
    if options.json:
        print(json.dumps(as_json(plan) | {"train": train_json(plan, why_not), "notes": notes}, allow_nan=False))
    else:
        show(plan, name, notes, why_not, unit)
    return 0


def cannot_train(setting: Setting, on_cpu: bool, nodes: int) -> str | None:
    """Why ``staleflow train`` cannot use this; None if it can."""
    rollout = setting.gpus_per_instance if on_cpu else setting.instances * setting.gpus_per_instance
    if nodes == 1 and rollout == 1 and setting.training_gpus == 1:
        return None
    if on_cpu:
        return f"staleflow train has one trainer on a CPU, and here it would be {setting.training_gpus}"
    where = "" if nodes == 1 else f", all of them on one of the {nodes} machines"
    return (
        f"staleflow train needs runtime=ray for {rollout} GPUs that decode, and training.ranks={setting.training_gpus} "
        f"for those that train{where}; neither was tested on more than one GPU yet"
    )


def settings_of(setting: Setting) -> list[str]:
    """What was found, as settings of a run."""
    return [
        f"staleness={setting.staleness}",
        f"groups={setting.groups}",
        f"rollout.max_tokens={setting.workload.max_tokens}",
    ]


def measured_setting(options: argparse.Namespace, wanted: GivenSettings) -> tuple[Config, Setting, list[str]]:
    """A run as it was configured and measured, with changes, and what is assumed."""
    if given := [name for name in ("cluster.gpu", "model") if name in wanted.names]:
        raise ConfigError(f"{given[0]} and --run-dir both say what everything costs: leave one out")
    if given := [name for name in ("cluster.trace", *LENGTHS) if name in wanted.names]:
        raise ConfigError(f"{given[0]} and --run-dir both say how long responses are: leave one out")
    run = read_run(options.run_dir)
    setting = fitted(options, wanted, run.setting(wanted.words, wanted.source))
    notes: list[str] = []
    if run.cost is None and not wanted.names & {"cluster.profile", "cluster.costs"}:
        notes.append(f"{options.run_dir} has no profile.json, so engine steps cost what its configuration says or "
                     "suggests: measure them with staleflow profile and give --profile")  # fmt: skip
    return run.config(wanted.words, wanted.source), setting, notes


def read_search(options: argparse.Namespace) -> Search:
    for name in ("most_staleness", "worth"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name):g} is impossible: give 0 or more")
    if options.most_groups < 1:
        raise ConfigError(f"--most-groups {options.most_groups} is impossible: give 1 or more")
    return Search(options.most_staleness, options.most_groups, worth=options.worth / 100)


# The plan as data


def as_json(plan: Plan) -> dict[str, Any]:
    return {
        "preset": plan.start.setting.name,
        "gpus": plan.start.setting.gpus,
        "limit_tokens_per_s": plan.best.limit,
        "start": trial_json(plan.start),
        "recommended": trial_json(plan.best),
        "gain": plan.best.tokens_per_s / plan.start.tokens_per_s - 1,
        "knobs": [turn_json(turn) for turn in plan.turns],
        "bounds": [trial_json(trial) for trial in plan.bounds],
    }


def train_json(plan: Plan, why_not: str | None) -> dict[str, Any]:
    return {"usable": why_not is None, "why_not": why_not, "settings": settings_of(plan.best.setting)}


def trial_json(trial: Trial) -> dict[str, Any]:
    setting = trial.setting
    return {
        "staleness": setting.staleness,
        "groups": setting.groups,
        "max_tokens": setting.workload.max_tokens,
        "rollout_gpus": setting.instances * setting.gpus_per_instance,
        "training_gpus": setting.training_gpus,
        "trained_tokens_per_s": trial.tokens_per_s,
        "mean_staleness": trial.mean_staleness,
        "percent_of_limit": 100 * trial.tokens_per_s / trial.limit,
        "percent_of_law": 100 * trial.tokens_per_s / trial.ceiling.tokens_per_s,
        "cut_off": trial.cut,
        "law": law_json(trial.law),
    }


def law_json(terms: Law) -> dict[str, Any]:
    return {
        "training_s": terms.train_s,
        "rollout_s": terms.rollout_s,
        "tail_s": terms.tail_s,
        "binds": terms.binds,
    }


def turn_json(turn: Turn) -> dict[str, Any]:
    found = {"knob": turn.knob, "value": turn.value, "gain": turn.gain, "taken": turn.taken, "cut_off": turn.after.cut}
    return found | {"simulated": turn.simulated}


# For people


def show(plan: Plan, name: str, notes: Sequence[str], why_not: str | None, unit: str) -> None:
    """``name``: what is planned for; ``unit``: what is divided, GPUs or processes."""
    from rich.markup import escape
    from rich.table import Table

    out = console()
    best, setting, terms = plan.best, plan.best.setting, plan.best.law
    out.print(
        f"Recommended for {escape(name)} on {plan.start.setting.gpus} {unit} are bound {setting.staleness}, "
        f"{setting.groups} groups for each step, responses up to {setting.workload.max_tokens:,} tokens, and "
        f"{setting.instances * setting.gpus_per_instance} rollout and {setting.training_gpus} training {unit}. "
        f"Expected: {best.tokens_per_s:,.0f} trained tokens/s, "
        f"{best.tokens_per_s / plan.start.tokens_per_s - 1:+.0%} over the setting as given."
    )
    out.print(
        f"A step takes at least {terms.train_s:,.1f} s for training, {terms.rollout_s:,.1f} s for rollout and "
        f"{terms.tail_s:,.1f} s for its longest response. What binds is {terms.binds}: {MEANING[terms.binds]}."
    )
    if why_not is None:
        out.print(f"To train with it: staleflow train ... {' '.join(settings_of(setting))}")
    else:
        out.print(
            f"It was never trained with: {why_not}. Bound, batch and cap as settings: "
            f"{' '.join(settings_of(setting))}. For what was, plan with --gpus 2."
        )
    for note in notes:
        out.print(f"Note: {note}.")
    knobs = Table(title="what each knob is worth", title_justify="left")
    for name in ("knob", "turned to", "tokens/s", "gain", "cut off", "taken"):
        knobs.add_column(name, justify="left" if name == "knob" else "right")
    for turn in plan.turns:
        to = f"{turn.value:,} training {unit}" if turn.knob == "split" else f"{turn.value:,}"
        most = "" if turn.simulated else "at most "
        cells = (f"{most}{turn.after.tokens_per_s:,.0f}", f"{most}{turn.gain:+.1%}", f"{turn.after.cut:.1%}")
        knobs.add_row(turn.knob, to, *cells, "yes" if turn.taken else "no")
    out.print(knobs)
    bounds = Table(title="by bound, each with its best split", title_justify="left")
    names = (
        "bound",
        f"{unit} r+t",
        "tokens/s",
        "% limit",
        "% law",
        "training s",
        "rollout s",
        "tail s",
        "binds",
        "stale",
    )
    for name in names:
        bounds.add_column(name, justify="right")
    for trial in plan.bounds:
        bounds.add_row(*_bound(trial))
    out.print(bounds)


def _bound(trial: Trial) -> Iterator[str]:
    setting, terms = trial.setting, trial.law
    yield f"{setting.staleness}"
    yield f"{setting.instances * setting.gpus_per_instance}+{setting.training_gpus}"
    yield f"{trial.tokens_per_s:,.0f}"
    yield f"{100 * trial.tokens_per_s / trial.limit:.0f}"
    yield f"{100 * trial.tokens_per_s / trial.ceiling.tokens_per_s:.0f}"
    for seconds in (terms.train_s, terms.rollout_s, terms.tail_s):
        yield f"{seconds:,.1f}"
    yield terms.binds
    yield f"{trial.mean_staleness:.2f}"


def draw(plan: Plan) -> str:
    """Throughput against the bound, and against the split of what is recommended; with what the law allows."""
    name, best = plan.start.setting.name, plan.best
    by_bound = [
        Curve("simulated", [(trial.setting.staleness, trial.tokens_per_s, 0) for trial in plan.bounds]),
        Curve("the law", [(trial.setting.staleness, trial.ceiling.tokens_per_s, 0) for trial in plan.bounds], True),
    ]
    work = work_of(best.setting)
    streamed = best.setting.strategies.consume == "stream"
    low, high = min(best.splits), max(best.splits)
    allowed = [law(split, streamed, work) for split in splits(best.setting) if low <= split.training_gpus <= high]
    by_split = [
        Curve("simulated", [(gpus, speed, 0) for gpus, speed in sorted(best.splits.items())]),
        Curve("the law", [(each.training_gpus, each.tokens_per_s, 0) for each in reversed(allowed)], True),
    ]
    title = f"bound {best.setting.staleness}, {best.setting.groups} groups: trained tokens/s against training GPUs"
    parts = [
        chart(by_bound, f"{name}: trained tokens/s against the bound", "staleness bound", [("limit", best.limit)]),
        chart(by_split, title, "training GPUs", [("limit", best.limit)]),
    ]
    return document(stacked([(part, float(HEIGHT)) for part in parts]), 2 * HEIGHT, f"Plan for {name}")
