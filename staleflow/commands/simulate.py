"""``staleflow simulate``: one run under the virtual clock, as a table, as JSON or as a picture.

Whatever is wrong with what was asked for is told in one line, with exit code 2, before anything runs or is written. A
run that gets stuck says so in one line too, with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import time

from staleflow.commands.options import Subparsers, add_options, check_picture, read_changes, read_setting, refuse, write
from staleflow.errors import ConfigError
from staleflow.protocol.ledger import LedgerError
from staleflow.runtime.control import StalledError
from staleflow.simulate import faults, invariants
from staleflow.simulate.clock import DeadlockError
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.workload import WorkloadError
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
    add_options(parser)
    who = ", ".join(POLICIES)
    parser.add_argument("--policy", default=STALEFLOW.name, help=f"who decides: {who} (default: {STALEFLOW.name})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal runs (default: 0)")
    parser.add_argument("--faults", type=int, default=0, metavar="N", help="let N random faults happen")
    parser.add_argument("--picture", metavar="FILE.svg", help="write the run's timeline")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        policy = named(read_changes(options).get("policy", options.policy))
        setting = policy.fit(read_setting(options))
        picture = check_picture(options.picture)
        cluster = Cluster(setting, options.seed, policy=policy)
        if options.faults:
            arm_faults(cluster, options.faults)
    except (ConfigError, WorkloadError, LedgerError) as error:
        return refuse(error)
    timeline = Timeline(cluster) if picture else None
    began = time.perf_counter()
    try:
        cluster.run()
    except (StalledError, DeadlockError) as error:
        return refuse(f"the run is stuck: {error}", code=1)
    except invariants.BrokenInvariantError as error:
        return refuse(f"a promise was broken, please report it with the command: {error}", code=1)
    result = row(cluster, time.perf_counter() - began)
    if picture and timeline:
        try:
            write(picture, draw(timeline))
        except OSError as error:
            return refuse(f"--picture {picture}: {error.strerror}; give a path that can be written")
    print(json.dumps(result, allow_nan=False) if options.json else table(result))
    return 0


def arm_faults(cluster: Cluster, count: int) -> None:
    if count < 0:
        raise ConfigError(f"--faults {count} is impossible; give 0 or more")
    if cluster.policy is not STALEFLOW:
        raise ConfigError(f"--faults is for {STALEFLOW.name}: {cluster.policy.name} keeps no journal to come back from")
    faults.arm(cluster, count)
    invariants.watch(cluster)
