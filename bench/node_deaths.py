"""Nodes that lose their power under real runs, and an audit of what the runs leave.

    .venv-ray/bin/python bench/node_deaths.py --json docs/results/node_deaths.json             # an hour
    .venv-ray/bin/python bench/node_deaths.py --json docs/results/node_deaths.json --cases 1   # a part of it: minutes
    .venv-ray/bin/python bench/node_deaths.py --kills 3 --seed 7

Each run has two Ray nodes on loopback addresses of this machine, and the control plane on a third. One of the two,
drawn by the seed, is killed with everything on it, often the trainer; another one is added; some steps later it happens
again. SIGTERM ends the run, and ``bench/chaos_audit.py`` reads what it has left: nothing lost, nothing trained twice,
nothing older than the bound, no process left behind. *Next step*: from the kill until two more steps are committed: the
first may have been on its way. What is in the file already counts: a bench that is started again continues.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import amounts, kept  # noqa: E402
from bench.chaos_audit import audit  # noqa: E402
from bench.chaos_lab import HangError, Victim  # noqa: E402
from bench.ray_nodes import Nodes, node_of  # noqa: E402

EACH = 5
"""Kills of one run: a process that dies more than five times in ten minutes ends it."""
CALM = 4
"""Steps between two of them."""
STOPPED = 130
"""How a run that was asked to end ends."""
SETTINGS = (
    "laptop",
    "runtime=ray",
    "steps=100000",
    "groups=4",
    "group_size=4",
    "rollout.max_tokens=48",
    "evaluation.problems=8",
    "evaluation.every=0",
    "checkpoints.every=10",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=amounts.count, default=50, help="in all (%(default)s)")
    parser.add_argument("--seed", type=amounts.whole, default=0, help="of the first run")
    parser.add_argument("--cases", type=amounts.whole, default=10**6, help="runs at most, this time")
    parser.add_argument(
        "--json", type=kept.to_continue_list, metavar="FILE", help="where results are kept, and continued from"
    )
    options = parser.parse_args()
    file: Path | None = options.json
    cases: list[dict[str, Any]] = json.loads(file.read_text()) if file is not None and file.exists() else []
    for _ in range(options.cases):
        if (left := options.kills - len(deaths(cases))) <= 0:
            break
        cases.append(case(options.seed + len(cases), min(EACH, left)))
        print(json.dumps(cases[-1]), flush=True)
        kept.write(file, cases)
    bad = [each for each in cases if not each["well"]]
    print(f"{len(cases)} runs, {len(bad)} with findings")
    for kind, trainer in (("the trainer's", True), ("another", False)):
        if waits := [kill["next_step_s"] for kill in deaths(cases) if kill["trainer"] == trainer]:
            median, most = statistics.median(waits), max(waits)
            print(f"{len(waits)} times {kind} node: next step after {median:.1f} s, at most {most:.1f} s")
    return 1 if bad else 0


def deaths(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kill for each in cases for kill in each["kills"]]


def case(seed: int, kills: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="staleflow-nodes-")).resolve()
    deaths: list[dict[str, Any]] = []
    findings: list[str] = []
    with Nodes() as nodes:
        os.environ.update(nodes.environment)
        victim = Victim(SETTINGS, folder)
        try:
            disturb(victim, nodes, random.Random(seed), kills, deaths)
            if victim.ended(120) != STOPPED:
                findings.append(f"it ended with {victim.codes[-1]}: {victim.last()}")
            findings += victim.left_behind()
        except HangError as error:
            findings.append(str(error))
        finally:
            if victim.alive:
                victim.kill_tree()
    steps = 0
    if victim.run is not None and victim.summary:
        found = audit(victim.run, victim.summary)
        steps = found.steps
        findings += [] if found.well else [str(found)]
    if findings:
        print(f"seed {seed}: {folder} is kept", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    about = {"seed": seed, "steps": steps, "restarts": victim.summary.get("restarts"), "kills": deaths}
    return about | {"well": not findings, "findings": findings}


def disturb(victim: Victim, nodes: Nodes, draw: random.Random, kills: int, deaths: list[dict[str, Any]]) -> None:
    """Kill ``kills`` nodes under the run, which add to ``deaths``, and ask it to end."""
    there = {node.host: node for node in (nodes.add(), nodes.add())}
    victim.start()
    for _ in range(kills):
        since = victim.version
        victim.wait(lambda since=since: victim.version >= since + CALM, "steps")
        host = draw.choice(sorted(there))
        trainer = host in map(node_of, victim.pids("trainer"))
        began, since = time.monotonic(), victim.version
        nodes.kill(there.pop(host))
        added = nodes.add()
        there[added.host] = added
        victim.wait(lambda since=since: victim.version > since + 1, "steps after the kill")
        deaths.append({"trainer": trainer, "next_step_s": round(time.monotonic() - began, 1)})
    victim.signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
