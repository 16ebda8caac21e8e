"""Where one control plane ends: what a decision and a trajectory cost it with thousands of instances, and what follows.

    taskset -c 1 python bench/scaling.py                              # 1,024 and 4,096 instances: minutes
    taskset -c 1 python bench/scaling.py --quick                      # 128 instances: seconds
    taskset -c 1 python bench/scaling.py --instances 10000 --steps 2 --json

*Cells* are simulated runs of the preset ``paper-14b``, each in a process of its own, with ``IN_FLIGHT`` trajectories in
flight for each instance. The control plane is the production code. Its CPU time counts, and that of the simulated
engines, trainer and rewards does not. A decision is a whole cycle in which something was decided: draw prompts,
observe, decide, place, send. A pause is any other call, such as the commit of a step. The garbage collector is off in
the cells. What the measurement itself costs is measured first and left out. *disturbed*: CPU time is longer, too, while
others use the core's caches and its other half; a fixed piece of work, done now and then, takes this many times what it
takes at best.

*Filling* drives the control plane without a simulator: an empty fleet pulls and is filled, which takes seconds with
10,000 instances, too.

What the simulator leaves out is measured beside it (``bench/scaling_parts.py``). *Live*: what trajectories in flight
take of memory without their tokens, and how long a full collection looks at them. *Real*: what messages, payload and
the journal on disk add, for a trajectory and for one report of its tokens so far, of which workers send one every two
seconds or, with many instances, less often. *Saturation* is arithmetic on all that: how many instances of the preset
one control plane serves before it runs out of a core, of the network, of the disk or of memory (of what is really held,
and of the limit, which counts the longest response for each), and how long a version takes to all nodes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scaling_parts import GROUP, IN_FLIGHT, filling, live, real

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts
from staleflow.coordinator.decide import Decision
from staleflow.runtime.control import ControlPlane
from staleflow.servers.weights.sharing import MOST_SENDING
from staleflow.simulate.cluster import Cluster, RewardLink
from staleflow.simulate.network import Remote
from staleflow.simulate.setting import preset
from staleflow.simulate.trainer import TrainerLink
from staleflow.workers.rollout import stream_s

TARGET_MS = 50.0
"""For a decision, at the 99th percentile."""
CELLS, QUICK = (1_024, 4_096), (128,)
LINK, DISK, MEMORY = 25e9 / 8, 1e9, 64e9
"""The machine of the control plane in the arithmetic: a network of 25 Gb/s, a disk that syncs 1 GB/s, 64 GB."""
NODE_LINK, ON_A_NODE = 400e9 / 8, 8
"""And what the nodes have: 400 Gb/s, and eight instances on each but the trainer's."""
SPREAD = (512, 1_250, 10_000)
"""Nodes."""
WEIGHTS, MOST_TOKENS = 29.5e9, 20_000
"""Of the preset: bytes of the weights, and the longest response."""


@dataclass(slots=True)
class Clock:
    """CPU time of the control plane's calls, without what stands behind its ports."""

    decisions: list[float] = field(default_factory=list[float])
    parts: dict[str, float] = field(default_factory=dict[str, float])
    calls: dict[str, int] = field(default_factory=dict[str, int])
    longest: dict[str, float] = field(default_factory=dict[str, float])
    running: list[int] = field(default_factory=list[int])
    most: int = 0
    """Trajectories in flight."""
    yardsticks: list[float] = field(default_factory=list[float])
    """What a fixed piece of work took, now and then."""
    _outside: float = 0.0
    _calls: int = 0
    """Made to the outside so far."""
    _own: float = 0.0
    """What the measurement of one of them adds to the time inside."""
    _decided: bool = False

    def inside(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        self.parts[part], self.calls[part], self.longest[part] = 0.0, 0, 0.0

        def timed(control: ControlPlane, *arguments: Any) -> Any:
            before, calls, began = self._outside, self._calls, time.thread_time()
            result = call(control, *arguments)
            spent = time.thread_time() - began - (self._outside - before) - self._own * (self._calls - calls)
            self._outside += spent  # a call within a call counts once
            self.parts[part] += spent
            self.calls[part] += 1
            if part != "decide":
                self.longest[part] = max(self.longest[part], spent)
            elif self._decided:
                if len(self.decisions) % 16 == 0:
                    self.yardsticks.append(yardstick())
                self.decisions.append(spent)
                self.most = max(self.most, len(control.server.trajectories))
                self._decided = False
            return result

        return timed

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            before, calls, began = self._outside, self._calls, time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._outside, self._calls = before + time.thread_time() - began, calls + 1

        return timed

    def calibrate(self) -> None:
        """Find out what the measurement of a call to the outside costs the side that calls."""
        nothing = self.outside(lambda: None)

        def many(calls: int = 1_000) -> float:
            before, began = self._outside, time.thread_time()
            for _ in range(calls):
                nothing()
            return (time.thread_time() - began - (self._outside - before)) / calls

        self._own = min(many() for _ in range(20))

    def decided(self, _now: float, decision: Decision) -> None:
        self._decided = True
        self.running.append(decision.inputs["running"])

    @contextmanager
    def watching(self) -> Iterator[None]:
        inside = {"decide": "_cycle", "report": "on_report", "score": "on_scored", "commit": "on_pushed"}
        outside = [(Remote, "send"), (Remote, "heard"), (RewardLink, "score"), (TrainerLink, "feed")]
        outside += [(Cluster, name) for name in ("tokens", "_committed", "_aborted", "_decided")]
        self.calibrate()
        changed = [(ControlPlane, name) for name in inside.values()] + outside
        originals = [(owner, name, getattr(owner, name)) for owner, name in changed]
        for part, name in inside.items():
            setattr(ControlPlane, name, self.inside(part, getattr(ControlPlane, name)))
        for owner, name in outside:
            setattr(owner, name, self.outside(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


def simulated(instances: int, steps: int, seed: int = 1) -> dict[str, Any]:
    """One cell, in this process."""
    setting = preset("paper-14b")
    groups = instances * IN_FLIGHT // (GROUP * (setting.staleness + 1))
    setting = replace(setting, instances=instances, groups=groups, training_gpus=instances, steps=steps)
    clock = Clock()
    with clock.watching():
        cluster = Cluster(setting, seed)
        cluster.control.on_decision = clock.decided
        cluster.run()
    times = sorted(1e3 * each for each in clock.decisions)
    placed, ended, trained = cluster.control.watch.routed, clock.calls["score"], groups * GROUP * steps
    count = {"decide": placed, "report": ended, "score": ended, "commit": trained}
    seconds = cluster.loop.time()
    return {
        "instances": instances,
        "in_flight": clock.most,
        "running": sum(clock.running) / len(clock.running),
        "decisions": len(times),
        "decision_ms": {"p50": at(times, 0.5), "p99": at(times, 0.99), "max": times[-1]},
        "disturbed": at(sorted(clock.yardsticks), 0.5) / min(clock.yardsticks),
        "over_target": sum(each > TARGET_MS for each in times),
        "target_met": at(times, 0.99) < TARGET_MS,
        "us_per_trajectory": {part: 1e6 * spent / count[part] for part, spent in clock.parts.items()},
        "pause_ms": {part: 1e3 * spent for part, spent in clock.longest.items() if part != "decide"},
        "events_per_trajectory": cluster.journal.position / placed,
        "step_s": seconds / steps,
        "trajectories_per_s": ended / seconds,
        "tokens_per_trajectory": cluster.recorder.trained_tokens / trained,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def yardstick() -> float:
    began, table = time.thread_time(), dict[str, tuple[int, int]]()
    for each in range(2_000):
        table[str(each)] = each, each
    return time.thread_time() - began


def at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))]


# What follows


def saturation(cell: dict[str, Any], alive: dict[str, float], beside: dict[str, float]) -> dict[str, Any]:
    """How many instances of the preset one control plane serves, by what it runs out of first."""
    rate = cell["trajectories_per_s"] / cell["instances"]
    running = cell["running"] / cell["instances"]
    own = sum(cell["us_per_trajectory"].values()) + beside["trajectory_us"]

    def streamed(instances: int) -> float:
        """Seconds a second for each of so many."""
        return 1e-6 * running * beside["stream_us"] / stream_s(instances)

    core = largest(lambda instances: instances * (1e-6 * rate * own + streamed(instances)) <= 1)
    tokens = rate * cell["tokens_per_trajectory"]
    # with fewer reports each has more tokens
    messages = rate * beside["trajectory_bytes"] + running * beside["stream_bytes"] / stream_s(1)
    in_memory = IN_FLIGHT * (alive["bytes_per_trajectory"] + 8 * cell["tokens_per_trajectory"])
    most = {
        "a core": core,
        "the network": LINK / messages,
        "the disk": DISK / (8 * tokens + rate * beside["log_bytes"]),
        "memory": MEMORY / in_memory,
        "the memory limit": MEMORY / (IN_FLIGHT * 8 * MOST_TOKENS),
    }
    return {
        "trajectories_per_s_and_instance": rate,
        "tokens_per_s_and_instance": tokens,
        "bytes_per_s_and_instance": messages,
        "core_share_of_instance": 1 / core,
        "of_it_streams": streamed(core) * core,
        "us_per_trajectory": own,
        "version_to_nodes_s": {nodes: spread_s(nodes) for nodes in SPREAD},
        "instances": most,
        "first": min(most, key=most.__getitem__),
    }


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number up to which it does."""
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def spread_s(nodes: int) -> float:
    """Seconds until so many nodes have a version that the trainer's has: each that has it sends it to others."""
    have, rounds = 1, 0
    while have <= nodes:
        have, rounds = have * (1 + MOST_SENDING), rounds + 1
    return rounds * MOST_SENDING * WEIGHTS / NODE_LINK


def apart(part: str, *arguments: int) -> Any:
    """A part of the measurement in a process of its own: its memory is its own too."""
    command = [sys.executable, __file__, "--part", part, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(instances: tuple[int, ...], steps: int, quick: bool) -> dict[str, Any]:
    cells = [apart("simulated", each, steps) for each in instances]
    filled = [apart("filling", each) for each in ((128,) if quick else (1_024, 4_096, 10_000))]
    alive = [apart("live", each) for each in ((20_000,) if quick else (100_000, 1_000_000))]
    beside = apart("real", 16 if quick else 128)
    end = saturation(cells[-1], alive[-1], beside)
    return {"cells": cells, "filling": filled, "live": alive, "real": beside, "saturation": end, "target_ms": TARGET_MS}


PARTS: dict[str, Callable[..., Any]] = {"simulated": simulated, "filling": filling, "live": live, "real": real}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="a small fleet, for a look")
    parser.add_argument("--instances", type=amounts.count, nargs="+", help="one cell for each")
    parser.add_argument("--steps", type=amounts.count, default=3, help="of each cell (%(default)s)")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, *arguments = options.part
        print(json.dumps(PARTS[part](*map(int, arguments))))
        return
    instances = tuple(options.instances or (QUICK if options.quick else CELLS))
    result = measure(instances, options.steps, options.quick)
    print(json.dumps(result, indent=1) if options.json else tables(result))


def tables(result: dict[str, Any]) -> str:
    lines = [
        "instances  in flight  decisions  p50 ms   p99 ms   max ms  over  disturbed"
        "  us/trajectory: decide  report  score  commit  longest pause ms  peak GB"
    ]
    for cell in result["cells"]:
        ms, us, pause = cell["decision_ms"], cell["us_per_trajectory"], max(cell["pause_ms"].values())
        lines.append(
            f"{cell['instances']:9,}  {cell['in_flight']:9,}  {cell['decisions']:9,}"
            f"  {ms['p50']:6.2f}  {ms['p99']:7.1f}  {ms['max']:7.1f}  {cell['over_target']:4}"
            f"  {cell['disturbed']:9.2f}"
            f"  {us['decide']:21.1f}  {us['report']:6.1f}  {us['score']:5.1f}  {us['commit']:6.1f}"
            f"  {pause:16.0f}  {cell['peak_gb']:7.2f}"
        )
    for each in result["filling"]:
        lines.append(
            f"{each['instances']:,} empty instances: {each['first_ms']:.1f} ms for the decision in which all pull, "
            f"then {each['p50_ms']:.1f} (p50) and at most {each['max_ms']:.1f}"
        )
    for each in result["live"]:
        lines.append(
            f"{each['trajectories']:,} in flight: {each['bytes_per_trajectory']:.0f} bytes each without tokens; a full "
            f"collection takes {each['collection_ms']:.0f} ms, once frozen {each['collection_ms_frozen']:.1f}"
        )
    lines += [f"{name:24} {value:14,.3f}" for name, value in result["real"].items()]
    end = result["saturation"]
    lines += [f"{name:32} {value:14,.4f}" for name, value in end.items() if isinstance(value, float)]
    lines += [f"instances until {name} is full: {count:,.0f}" for name, count in end["instances"].items()]
    lines += [f"a version to {nodes:,} nodes: {seconds:.1f} s" for nodes, seconds in end["version_to_nodes_s"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
