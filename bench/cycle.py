"""How long a whole cycle of the coordinator takes in a simulated run: draw prompts, observe, decide, place and send.

    python bench/cycle.py [--json] [--instances 1024] [--groups 2730]

``bench/coordinator.py`` times the decision alone, on made-up situations. Here every cycle of a run counts in which at
least ``LIVE`` trajectories are live; time spent inside the simulated engines is taken out, since real ones work
elsewhere.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

from staleflow.runtime.control import ControlPlane
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.network import Remote
from staleflow.simulate.setting import preset
from staleflow.types import Command

LIVE = 100_000
TARGET_MS = 50.0


class Watch:
    """Processor time of every cycle, without that of the engines."""

    def __init__(self, live: int) -> None:
        self.milliseconds: list[float] = []
        self._engines = 0.0
        cycle, send = ControlPlane._cycle, Remote.send

        def timed_send(remote: Remote, command: Command) -> None:
            start = time.process_time()
            send(remote, command)
            self._engines += time.process_time() - start

        def timed_cycle(control: ControlPlane) -> None:
            start, engines = time.process_time(), self._engines
            cycle(control)
            if len(control.server.trajectories) >= live:
                self.milliseconds.append(1e3 * (time.process_time() - start - self._engines + engines))

        setattr(ControlPlane, "_cycle", timed_cycle)  # noqa: B010  # a bench, not code that others call
        setattr(Remote, "send", timed_send)  # noqa: B010


def measure(instances: int, groups: int, steps: int) -> dict[str, Any]:
    watch = Watch(min(LIVE, groups * 16))
    setting = replace(preset("paper-14b"), instances=instances, groups=groups, training_gpus=instances, steps=steps)
    Cluster(setting, seed=1).run()
    times = sorted(watch.milliseconds)
    return {
        "instances": instances,
        "groups": groups,
        "cycles": len(times),
        "median_ms": round(statistics.median(times), 2),
        "p95_ms": round(times[int(0.95 * len(times))], 1),
        "max_ms": round(times[-1], 1),
        "over_target": sum(each > TARGET_MS for each in times),
        "target_ms": TARGET_MS,
        "target_met": times[-1] <= TARGET_MS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--instances", type=int, default=1024)
    parser.add_argument("--groups", type=int, default=2730, help="for each step, of 16 trajectories")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    result = measure(options.instances, options.groups, options.steps)
    print(
        json.dumps(result, indent=1)
        if options.json
        else "\n".join(f"{key:12} {value}" for key, value in result.items())
    )


if __name__ == "__main__":
    main()
