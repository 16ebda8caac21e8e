"""What a simulated training step costs in real time and memory, and how that grows with the fleet.

    python bench/simulator.py            # a table
    python bench/simulator.py --json     # the same as JSON
    python bench/simulator.py --quick    # the small cells only

Each cell is a run of the preset with another fleet and batch, in a process of its own, so that its peak memory is its
own too. The *grid* has one group of 16 for each instance and as many training GPUs as instances: everything grows with
the fleet, and its growth is fitted. The *sized* cells have the batch of the preset, or the largest that is aimed at.
Seconds per step are those of the whole run with its start, over its steps; targets are for these. Other work on the
machine makes them longer, so there is the processor time too. ``steady`` is processor time without the start, between
the commit of step ``staleness`` and the last one, and the growth is fitted to it. Groups in flight are those that the
bound allows.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts
from staleflow.servers.lifecycle import Group
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.setting import preset

MOST_BYTES = 1e9
"""Peak memory of any cell."""
SLACK = 1.1
"""How much more a trajectory may cost in the largest grid cell than in the smallest, beyond n log n: noise."""


@dataclass(frozen=True, slots=True)
class Cell:
    kind: str
    instances: int
    groups: int
    group_size: int
    training_gpus: int
    steps: int
    target_s: float | None = None
    """Real seconds for each step."""

    @property
    def trajectories(self) -> int:
        """Trajectories trained in each step."""
        return self.groups * self.group_size


GRID = (
    Cell("grid", 32, 32, 16, 32, 12),
    Cell("grid", 128, 128, 16, 128, 8, target_s=0.1),
    Cell("grid", 512, 512, 16, 512, 6),
    Cell("grid", 1_024, 1_024, 16, 1_024, 5),
)
SIZED = (
    Cell("sized", 128, 128, 16, 32, 8, target_s=0.1),
    Cell("sized", 1_024, 2_730, 4, 1_024, 5, target_s=1.5),
    Cell("sized", 1_024, 2_730, 16, 1_024, 4, target_s=1.5),
)
LARGE = 256
"""Instances from which on a cell runs only once, and not at all with ``--quick``."""


class Laps:
    """The processor time at which each step was committed."""

    def __init__(self, cluster: Cluster) -> None:
        self.times: list[float] = []
        self._before = cluster.control.server.on_committed
        cluster.control.server.on_committed = self._committed

    def _committed(self, step: int, groups: list[Group]) -> None:
        self.times.append(time.process_time())
        self._before(step, groups)


def measure(cell: Cell, seed: int) -> dict[str, Any]:
    """One cell, in this process."""
    setting = replace(
        preset("paper-14b"),
        instances=cell.instances,
        groups=cell.groups,
        group_size=cell.group_size,
        training_gpus=cell.training_gpus,
        steps=cell.steps,
    )
    cluster = Cluster(setting, seed)
    laps = Laps(cluster)
    began, processor = time.perf_counter(), time.process_time()
    cluster.run()
    wall, processor = time.perf_counter() - began, time.process_time() - processor
    steady = (laps.times[-1] - laps.times[setting.staleness]) / (cell.steps - setting.staleness - 1)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "wall_s_per_step": wall / cell.steps,
        "steady_processor_s_per_step": steady,
        "processor_s_per_step": processor / cell.steps,
        "simulated_s_per_step": cluster.loop.time() / cell.steps,
        "simulated_to_real": cluster.loop.time() / wall,
        "trajectories_per_s": cell.trajectories * cell.steps / wall,
        "events_per_s": cluster.journal.position / wall,
        "groups_in_flight": cell.groups * (setting.staleness + 1),
        "peak_bytes": kilobytes * (1 if sys.platform == "darwin" else 1024),
    }


def measure_apart(cell: Cell, seed: int, repeats: int) -> dict[str, Any]:
    """One cell, in a process for each repeat; the repeat of median time."""
    rows: list[dict[str, Any]] = []
    for _ in range(repeats):
        command = [sys.executable, __file__, "--cell", json.dumps(asdict(cell)), "--seed", str(seed)]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(ended.stdout))
    rows.sort(key=lambda row: row["wall_s_per_step"])
    row = {**asdict(cell), "trajectories": cell.trajectories, **rows[(len(rows) - 1) // 2]}
    row["us_per_n_log_n"] = (
        row["steady_processor_s_per_step"] / (cell.trajectories * math.log2(cell.trajectories)) * 1e6
    )
    row["time_met"] = None if cell.target_s is None else row["wall_s_per_step"] <= cell.target_s
    row["memory_met"] = row["peak_bytes"] < MOST_BYTES
    return row


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The exponent of a straight line through the grid on logarithmic scales, and the cost over n log n."""
    grid = [row for row in rows if row["kind"] == "grid"]
    sizes = [math.log(row["trajectories"]) for row in grid]
    costs = [math.log(row["steady_processor_s_per_step"]) for row in grid]
    middle, mean = sum(sizes) / len(grid), sum(costs) / len(grid)
    slope = sum((x - middle) * (y - mean) for x, y in zip(sizes, costs, strict=True))
    slope /= sum((x - middle) ** 2 for x in sizes)
    ratio = grid[-1]["us_per_n_log_n"] / grid[0]["us_per_n_log_n"]
    return {"exponent": slope, "n_log_n_ratio": ratio, "growth_met": ratio <= SLACK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help=f"only cells with fewer than {LARGE} instances")
    parser.add_argument(
        "--repeats", type=amounts.count, default=3, help="of which the median; large cells run once (default 3)"
    )
    parser.add_argument("--seed", type=amounts.whole, default=1)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(Cell(**json.loads(options.cell)), options.seed)))
        return
    cells = [cell for cell in (*GRID, *SIZED) if not options.quick or cell.instances < LARGE]
    rows = [measure_apart(cell, options.seed, options.repeats if cell.instances < LARGE else 1) for cell in cells]
    result = {"rows": rows, **growth(rows)}
    met = [row["memory_met"] and row["time_met"] is not False for row in rows]
    result["targets_met"] = all(met) and result["growth_met"]
    print(json.dumps(result, indent=1) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    lines = [
        "       instances  groups x size  training  in flight   s/step   target     processor   steady"
        "  simulated/real  trajectories/s  peak MB  us/(n log2 n)"
    ]
    for row in result["rows"]:
        target = f"{row['target_s']:6.1f} {'met' if row['time_met'] else 'NOT'}" if row["target_s"] else " " * 10
        lines.append(
            f"{row['kind']:5}  {row['instances']:9,}  {row['groups']:6,} x {row['group_size']:4}"
            f"  {row['training_gpus']:8,}  {row['groups_in_flight']:9,}  {row['wall_s_per_step']:7.3f}  {target}"
            f"  {row['processor_s_per_step']:9.3f}  {row['steady_processor_s_per_step']:7.3f}"
            f"  {row['simulated_to_real']:14,.0f}"
            f"  {row['trajectories_per_s']:14,.0f}  {row['peak_bytes'] / 1e6:7.0f}  {row['us_per_n_log_n']:13.2f}"
        )
    peak = max(row["peak_bytes"] for row in result["rows"])
    lines += [
        f"memory: at most {peak / 1e6:,.0f} MB (target below {MOST_BYTES / 1e6:,.0f}): {_met(peak < MOST_BYTES)}",
        f"growth over the grid: n to the power {result['exponent']:.2f}; over n log n, the largest cell costs "
        f"{result['n_log_n_ratio']:.2f} times the smallest (target at most {SLACK}): {_met(result['growth_met'])}",
        f"all targets: {_met(result['targets_met'])}",
    ]
    return "\n".join(lines)


def _met(yes: bool) -> str:
    return "met" if yes else "NOT met"


if __name__ == "__main__":
    main()
