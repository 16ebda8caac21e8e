"""How long ``staleflow why`` takes on a long run: a simulated one of 100,000 trajectories, recorded as any run is.

python bench/why.py             a table; --json for one object; --keep DIR to look at the run afterwards
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts
from staleflow.config import load
from staleflow.config.presets import PAPER
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_commits
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recording import Recording
from staleflow.simulate.setting import setting_of
from staleflow.study.result import row

GROUPS, SIZE = 64, 16
QUESTIONS = ("", "step 60", "why did instance 3 pull", "trajectory p3000/7", "group p3000")
TRIES = 5


def record(path: Path, steps: int) -> dict[str, Any]:
    words = [f"steps={steps}", f"groups={GROUPS}", f"group_size={SIZE}", "staleness=2", "rollout.instances=16"]
    config = load(PAPER, [*words, "cluster.training_gpus=32", "cluster.lengths=lognormal", "cluster.mean_tokens=800"])
    cluster = Cluster(setting_of(config, PAPER), seed=1)
    recording = Recording(cluster, directory := RunDirectory.at(path, config))
    began = time.perf_counter()
    cluster.run()
    recording.close(row(cluster, time.perf_counter() - began))
    sizes = {name: (directory.path / name).stat().st_size for name in ("events.db", "decisions.jsonl", "fleet.jsonl")}
    return {"trajectories": steps * GROUPS * SIZE, "events": read_commits(directory)[-1].last, "bytes": sizes}


def ask(path: Path, question: str) -> tuple[float, float, str]:
    """Seconds of the whole command, its start included, the best of some; its CPU seconds; and the sentence."""
    command = [sys.executable, "-m", "staleflow", "why", str(path), *question.split(), "--json"]
    walls, cpus, out = list[float](), list[float](), ""
    for _ in range(TRIES):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - began)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(cpus), json.loads(out)["answer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="record the run there; one that is there is asked")
    parser.add_argument("--steps", type=amounts.count, default=100, help=f"of {GROUPS * SIZE} trajectories each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "run"
        facts = record(path, options.steps) if not path.exists() else {}
        found = {question or "(none)": ask(path, question) for question in QUESTIONS}
    rows = {name: {"seconds": wall, "cpu_s": cpu, "answer": text} for name, (wall, cpu, text) in found.items()}
    if options.json:
        print(json.dumps(facts | {"questions": rows}))
        return
    print(facts)
    for name, each in rows.items():
        print(f"{name:26} {each['seconds']:6.2f} s ({each['cpu_s']:.2f} s of CPU)  {each['answer']}")


if __name__ == "__main__":
    main()
