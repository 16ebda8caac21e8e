"""Time from the death of the control plane to the next committed step, of a run that is killed again and again.

    python bench/in_place.py --kills 5

A short run of the laptop preset's task with the embedded model. Each time the control plane's process is killed right
after a step was committed; the clock stops when ``metrics.jsonl`` has the next step. The rest of the run's processes
must be those from before.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from staleflow.run.processes import processes

LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("words", nargs="*", help="settings, key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        print(json.dumps(measured(Path(runs).resolve(), options.kills, options.words)))


def measured(runs: Path, kills: int, words: list[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "staleflow", "train", f"runs={runs}", f"steps={6 * kills + 4}", *words, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    metrics, seconds = runs / "latest" / "metrics.jsonl", list[float]()

    def until(steps: int) -> None:
        began = time.monotonic()
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
            if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                sys.exit(f"the run ended or stood still before step {steps} (exit code {process.poll()})")
            time.sleep(0.002)

    for kill in range(kills):
        step = 6 * kill + 3
        until(step)
        before = {each.pid for each in processes((runs / "latest").resolve())}
        os.kill(control_of(process.pid, before), signal.SIGKILL)
        began = time.monotonic()
        until(step + 1)
        seconds.append(time.monotonic() - began)
        if {each.pid for each in processes((runs / "latest").resolve())} != before:
            sys.exit("processes were replaced")
    summary = json.loads(process.communicate(timeout=LIMIT_S)[0])
    return {
        "median_s": statistics.median(seconds),
        "seconds": [round(each, 2) for each in seconds],
        "restarts": summary["restarts"],
        "violations": summary["violations"],
    }


def control_of(supervisor: int, roles: set[int]) -> int:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return next(int(pid) for pid in children if int(pid) not in roles)


if __name__ == "__main__":
    main()
