"""``staleflow simulate``: one run under the virtual clock, as a table, as JSON or as a picture.

Mistakes are refused in one line, with exit code 2, before anything runs or is written. A run that gets stuck is
reported in one line too, with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from staleflow.commands.common import (
    Subparsers,
    add_simulated,
    check_picture,
    given_settings,
    read_setting,
    refuse_stuck,
    write_picture,
)
from staleflow.config import Config
from staleflow.errors import ConfigError
from staleflow.observe.progress import Progress
from staleflow.run.directory import RunDirectory
from staleflow.run.environment import write_environment
from staleflow.simulate import faults, invariants
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recording import Recording
from staleflow.simulate.setting import assumptions
from staleflow.study.peers import POLICIES, STALEFLOW, named
from staleflow.study.result import row, table
from staleflow.study.timeline import Timeline, draw


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a run under the virtual clock",
        description="Simulate a run: the production control plane over modelled engines, trainer and weights.",
        allow_abbrev=False,
    )
    add_simulated(parser)
    who = ", ".join(POLICIES)
    parser.add_argument("--policy", default=STALEFLOW.name, help=f"who decides: {who} (default: {STALEFLOW.name})")
    parser.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal runs (default: 0)")
    parser.add_argument("--faults", type=int, default=0, metavar="N", help="let N random faults happen")
    parser.add_argument("--picture", metavar="FILE.svg", help="write the run's timeline")
    parser.add_argument("--record", metavar="DIR", help="write a run directory, for staleflow dash and why")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    policy, wanted, picture = named(options.policy), given_settings(options), check_picture(options.picture)
    if options.record and policy is not STALEFLOW:
        raise ConfigError(f"--record is for {STALEFLOW.name}: {policy.name} keeps a ledger of its own")
    config, setting = read_setting(options, wanted)
    cluster = Cluster(policy.fit(setting), config.seed, policy=policy)
    if options.faults:
        arm_faults(cluster, options.faults)
    timeline = Timeline(cluster) if picture else None
    recording = Recording(cluster, recorded(options.record, config)) if options.record else None
    began = time.perf_counter()
    steps = cluster.recorder.steps
    with refuse_stuck(), Progress("simulate", lambda: len(steps) / setting.steps) as progress:
        progress.say(f"{setting.steps} steps of {setting.groups} groups, {setting.gpus} GPUs")
        cluster.run()
    result = row(cluster, time.perf_counter() - began) | {"notes": assumptions(config, setting)}
    if recording:
        recording.close(result)
    if picture and timeline:
        write_picture(picture, draw(timeline))
    print(json.dumps(result, allow_nan=False) if options.json else table(result))
    return 0


def recorded(path: str, config: Config) -> RunDirectory:
    directory = RunDirectory.at(Path(path), config)
    write_environment(directory, ["staleflow", *sys.argv[1:]])
    return directory


def arm_faults(cluster: Cluster, count: int) -> None:
    if count < 0:
        raise ConfigError(f"--faults {count} is impossible: give 0 or more")
    if cluster.policy is not STALEFLOW:
        raise ConfigError(f"--faults is for {STALEFLOW.name}: {cluster.policy.name} keeps no journal to come back from")
    faults.arm(cluster, count)
    invariants.watch(cluster)
