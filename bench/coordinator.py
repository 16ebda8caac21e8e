"""How long the coordinator takes to decide, by the size of the fleet and the number of live trajectories.

    python bench/coordinator.py            # a table
    python bench/coordinator.py --json     # the same as JSON

A cell is a fleet in the middle of a run: most trajectories run, the share ``--queued`` waits in the server, a quarter
of them begun and interrupted, the others fresh. In a *full* fleet there is room for nothing and every look is in vain;
in an *open* one each instance has lost a few trajectories and takes others. Figures are medians of repeats, in
processor time.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts
from staleflow.coordinator.decide import decide
from staleflow.coordinator.situation import Fleet, Pace, Queued, Route, Situation
from staleflow.coordinator.strategies import ROUTING, Strategies
from staleflow.simulate.setting import preset

TARGET_MS = 50.0
"""For one decision with 1,024 instances and 100,000 live trajectories."""
INSTANCES = (32, 128, 512, 1_024)
LIVE = (1_000, 10_000, 100_000)
GROUP = 16
VERSION = 7
COST = preset("paper-14b").rollout
Load = Literal["full", "open"]


def situation(instances: int, live: int, queued: float, load: Load, seed: int = 0) -> Situation:
    chance = random.Random(seed)
    waiting = int(live * queued)
    running = (live - waiting) // instances
    free = max(1, int(0.2 * waiting / instances))
    rows = range(instances)
    fleet = Fleet.of(
        [f"instance-{row}" for row in rows],
        version=[VERSION - chance.randint(0, 1) for _ in rows],
        running=[running] * instances,
        context=[running * 2_000 + chance.randrange(1_000) for _ in rows],
        kv_free=[free * chance.randint(1_500, 4_000) if load == "open" else chance.randrange(300) for _ in rows],
        max_running=[running + free] * instances,
    )
    started = waiting // 4
    queue = [
        Queued(f"t{at}", f"g{at // GROUP}", chance.randint(600, 8_000), VERSION - 2 + 3 * at // max(1, started))
        for at in range(started)
    ]
    for at in range(started, waiting, GROUP):
        context = chance.randint(100, 1_000)
        members = range(at, min(at + GROUP, waiting))
        queue += [Queued(f"t{member}", f"g{at}", context, None) for member in members]
    return Situation(
        now=1_000.0,
        newest=VERSION,
        fleet=fleet,
        queue=queue,
        room={VERSION - 1: 0, VERSION: live // GROUP},
        cost=COST,
        pull_s=0.7,
        group_size=GROUP,
        pace=Pace(step_s=100.0, mean_tokens=1_500.0),
    )


def measure(case: Situation, strategies: Strategies, repeats: int) -> dict[str, Any]:
    times: list[float] = []
    routed = 0
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        decision = decide(case, strategies)
        times.append(time.process_time() - start)
        routed = sum(isinstance(command, Route) for command in decision.commands)
    seconds = statistics.median(times)
    return {"ms": round(seconds * 1e3, 3), "routed": routed, "us_per_route": round(seconds * 1e6 / max(1, routed), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=amounts.count, default=5, help="repeats for each cell (default 5)")
    parser.add_argument("--instances", type=amounts.count, nargs="+", default=INSTANCES)
    parser.add_argument("--live", type=amounts.count, nargs="+", default=LIVE, help="live trajectories")
    parser.add_argument("--queued", type=amounts.amount, default=0.3, help="share of the live that waits (default 0.3)")
    parser.add_argument("--synchronisation", default="greedy", choices=("gain", "greedy", "starved"))
    parser.add_argument("--mu", type=amounts.amount, default=0.0, help="waterfall: least gain (default 0: takes most)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for instances in options.instances:
        for live in options.live:
            for load in get_args(Load):
                case = situation(instances, live, options.queued, load)
                for routing in ROUTING.entries:
                    how = Strategies(routing=routing, synchronisation=options.synchronisation, mu=options.mu)
                    cell = {"instances": instances, "live": live, "load": load, "routing": routing}
                    rows.append({**cell, **measure(case, how, options.repeats)})
    slowest = max(row["ms"] for row in rows)
    result = {"rows": rows, "slowest_ms": slowest, "target_ms": TARGET_MS, "target_met": slowest <= TARGET_MS}
    print(json.dumps(result, indent=1) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    lines = ["instances     live  load  routing            ms   routed  us/route"]
    for row in result["rows"]:
        lines.append(
            f"{row['instances']:9,}  {row['live']:7,}  {row['load']}  {row['routing']:12}"
            f"  {row['ms']:7.2f}  {row['routed']:7,}  {row['us_per_route']:8.2f}"
        )
    lines.append(f"slowest {result['slowest_ms']:.1f} ms (target {TARGET_MS:g})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
