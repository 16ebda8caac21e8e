"""What the live page costs a run: the first run of this package with ``--dash`` and somebody who watches, and without.

    python bench/dash_training.py [--json] [--repeats 5] [--steps 40] [--out FILE]

Runs alternate, so that what else the machine does falls on both. CPU seconds are those of all processes of a run; those
of the page are among them, and also said apart. ``--out`` keeps every run, and continues with those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts, kept

NAMES = ("without", "watched")
TICK = os.sysconf("SC_CLK_TCK")


def once(steps: int, watched: bool) -> dict[str, float]:
    """Trained tokens per second of one run, and the CPU seconds of its processes."""
    page = ["--dash", "--port", "0"] if watched else []
    with tempfile.TemporaryDirectory(prefix="staleflow-bench-") as runs:
        words = ["train", f"steps={steps}", f"runs={runs}", "--plain", "--json", *page]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(
            [sys.executable, "-m", "staleflow", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            heard: list[float] = []
            for line in process.stderr:
                if line.startswith("page: http"):
                    threading.Thread(target=watch, args=(line.split()[1], runs, heard), daemon=True).start()
            said = process.stdout.read()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads(said.splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if watched and not heard:
        raise SystemExit("nobody watched: the page was not there")
    return {
        "tokens_per_s": summary["trained_tokens_per_s"],
        "cpu_s": cpu,
        "wall_s": summary["wall_s"],
        "page_cpu_s": max(heard, default=0.0),
        "news": len(heard),
    }


def watch(url: str, runs: str, heard: list[float]) -> None:
    """As the page in a browser does: every change of the run, as it comes. With each, the CPU seconds of the page."""
    page = next(path for path in Path("/proc").glob("[0-9]*/cmdline") if is_page(path, runs)).with_name("stat")
    try:
        with urllib.request.urlopen(f"{url}api/events", timeout=60) as news:
            for line in news:
                if line.startswith(b"data: "):
                    heard.append(sum(map(int, page.read_text().rpartition(")")[2].split()[11:13])) / TICK)
    except OSError:
        return  # it ends with the run


def is_page(path: Path, runs: str) -> bool:
    try:
        words = path.read_bytes().decode()
    except OSError:  # it has ended
        return False
    return "--attached" in words and runs in words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=amounts.count, default=5)
    parser.add_argument("--steps", type=amounts.count, default=40)
    parser.add_argument("--out", type=kept.to_continue)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    if options.out and options.out.exists():
        found = kept.read(options.out).get("runs", found)
    while min(map(len, found.values())) < options.repeats:
        name = min(NAMES, key=lambda each: len(found[each]))
        found[name].append(once(options.steps, name == "watched"))
        shown = summed(found)
        kept.write(options.out, shown)
        print(name, found[name][-1], file=sys.stderr)
    shown = summed(found)
    if options.json:
        print(json.dumps(shown))
        return
    for what in ("tokens_per_s", "cpu_s"):
        values = "  ".join(f"{name} {shown[what][name]:,.1f}" for name in NAMES)
        print(f"{what:14} {values}  ({shown[what]['change']:+.1%})")
    print(f"{'page_cpu_s':14} {shown['page_cpu_s']:.1f}")


def summed(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and by which share they change when somebody watches."""
    shown: dict[str, Any] = {}
    if all(found.values()):
        for what in ("tokens_per_s", "cpu_s"):
            values = {name: statistics.median(each[what] for each in found[name]) for name in NAMES}
            shown[what] = values | {"change": values["watched"] / values["without"] - 1}
        shown["page_cpu_s"] = statistics.median(each["page_cpu_s"] for each in found["watched"])
    return shown | {"runs": found}


if __name__ == "__main__":
    main()
