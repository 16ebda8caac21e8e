"""What the live page takes: time until an event is shown, CPU, answers about a large run, first paint, size.

    python bench/dash.py [--json] [--instances 1000] [--trajectories 1000000] [--run DIR] [--seconds 20]

The large run comes from the simulator, with short responses so that it is made in minutes; ``--run`` keeps it, or takes
one that is there; its first reading is measured where it has no ``index.db`` yet. Latencies are over HTTP. First paint
needs Playwright and Chromium (``make test-page``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts
from staleflow.config import load
from staleflow.config.presets import PAPER
from staleflow.dash.server import PAGE
from staleflow.run.directory import RunDirectory
from staleflow.run.fleet import FleetLog, InstanceMoment, Moment
from staleflow.servers.durable import DurableJournal
from staleflow.simulate.cluster import Cluster
from staleflow.simulate.recording import Recording
from staleflow.simulate.setting import preset

TARGETS = {
    "event_to_page_s": 1.0,
    "answer_ms": 100.0,
    "idle_core": 0.01,
    "watched_core": 0.05,
    "first_paint_s": 1.0,
    "assets_bytes": 1_000_000,
}
"""At most."""
GROUP_SIZE = 16
ASKED = {
    "now": "now",
    "learning": "learning?points=600",
    "staleness": "staleness?points=300",
    "timeline, all": "timeline?columns=500&lanes=32",
    "timeline, last page": "timeline?columns=500&lanes=32&lane=960",
    "trajectories": "trajectories?limit=50",
    "trajectories given up": "trajectories?state=dropped&limit=50",
    "trajectories by name": "trajectories?name=p12345",
    "one trajectory, early": "trajectory?name=p17/3",
    "one trajectory, late": "trajectory?name=LAST",
}
TICK = os.sysconf("SC_CLK_TCK")


def record(path: Path, instances: int, trajectories: int) -> RunDirectory:
    """A simulated run of this size."""
    groups = max(1, min(instances, trajectories // GROUP_SIZE // 4))
    steps = -(-trajectories // (groups * GROUP_SIZE))
    base = preset(PAPER)
    workload = replace(base.workload, scale=0.03, max_tokens=512)  # short, so that it is made in minutes
    setting = replace(
        base,
        workload=workload,
        instances=instances,
        training_gpus=instances,
        groups=groups,
        group_size=GROUP_SIZE,
        staleness=1,
        steps=steps,
    )
    directory = RunDirectory.at(path, load(PAPER, [f"steps={steps}"]))
    cluster = Cluster(setting, seed=1)
    recording = Recording(cluster, directory)
    cluster.run()
    recording.close({})
    return directory


@contextmanager
def page_of(directory: Path) -> Iterator[tuple[str, int]]:
    """``staleflow dash`` as users start it: its address and its process."""
    words = [sys.executable, "-m", "staleflow", "dash", str(directory), "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
        process.terminate()


def ask(url: str, path: str) -> tuple[float, Any]:
    """Milliseconds, and the answer."""
    began = time.perf_counter()
    with urllib.request.urlopen(f"{url}api/{path}", timeout=60) as answer:
        body = answer.read()
    return 1e3 * (time.perf_counter() - began), json.loads(body)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory_mb(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def large(directory: RunDirectory, seconds: float) -> dict[str, Any]:
    """Reading a large run for the first time, answers meanwhile and afterwards, and what an idle page costs."""
    with page_of(directory.path) as (url, pid):
        began, meanwhile, before = time.perf_counter(), list[float](), cpu_s(pid)
        while True:
            took, now = ask(url, "now")
            meanwhile.append(took)
            if not now["info"]["heads"]["behind"] and now["info"]["step"]:
                break
            time.sleep(0.2)
        read_s, read_cpu = time.perf_counter() - began, cpu_s(pid) - before
        last = ask(url, "trajectories?limit=1")[1]["trajectories"][0]["name"]
        answers = {name: timed(url, pid, path.replace("LAST", last)) for name, path in ASKED.items()}
        time.sleep(4.0)  # until nobody is taken to look
        before = cpu_s(pid)
        time.sleep(seconds)
        idle = (cpu_s(pid) - before) / seconds
        found = {
            "trajectories": now["info"]["heads"]["trajectories"],
            "instances": ask(url, "timeline?lanes=1&columns=1")[1]["instances"],
            "first_read_s": read_s,
            "first_read_cpu_s": read_cpu,
            "answer_while_reading_ms": statistics.median(meanwhile),
            "memory_mb": memory_mb(pid),
            "answers_ms": {name: took for name, (took, _) in answers.items()},
            "answers_cpu_ms": {name: cpu for name, (_, cpu) in answers.items()},
            "idle_core": idle,
        }
    with page_of(directory.path) as (url, _):
        began = time.perf_counter()
        while ask(url, "now")[1]["info"]["heads"]["trajectories"] < found["trajectories"]:
            time.sleep(0.05)
        return found | {"open_again_s": time.perf_counter() - began}


def timed(url: str, pid: int, path: str, times: int = 25) -> tuple[float, float]:
    """Milliseconds until the answer is there, the median, and of CPU in the page's process, on average."""
    before = cpu_s(pid)
    took = statistics.median(ask(url, path)[0] for _ in range(times))
    return took, 1e3 * (cpu_s(pid) - before) / times


class Source:
    """A run of 16 instances that is alive: some hundred events a second, and the load of its instances."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory.at(path, load(PAPER, ["steps=1000"]))
        self._journal = DurableJournal(self.directory.journal(), lazy_s=0.4)
        sizes = {"batch_size": 64, "max_staleness": 4, "redundancy": 0, "group_size": 8, "extra_members": 0}
        self._journal.belongs_to(sizes)
        self._fleet = FleetLog(self.directory.fleet, on_trouble=print)
        self._prompt = 0
        self._ended = threading.Event()
        self.written: dict[str, float] = {}
        """When each of some trajectories was scored."""

    def run(self) -> None:
        began = time.monotonic()
        with self.directory.owned():
            while not self._ended.wait(0.1):
                now = time.monotonic() - began
                self._journal.stamp(now)
                for _ in range(8):
                    self._group()
                if self._fleet.due(now, 16, watched=True):
                    load_of = (InstanceMoment(f"i{each}", 0, 8, 0, 100, 1000, int(1e3 * now)) for each in range(16))
                    self._fleet.write(Moment(now, time.time(), instances=tuple(load_of)))
        self._journal.close()

    def _group(self) -> None:
        name, append = f"p{self._prompt}", self._journal.append
        append(("admit", self._prompt, 0, 32))
        append(("reserve", name, 0))
        for member in range(8):
            append(("route", f"{name}/{member}", f"i{member}", 1))
            append(("generated", f"{name}/{member}", ((0, 50),)))
            append(("score", f"{name}/{member}", 1.0))
        append(("occupy", name))
        self.written[name] = time.perf_counter()
        if self._prompt >= 32:
            append(("release", name, "bench", False))
        self._prompt += 1

    def end(self) -> None:
        self._ended.set()


def alive(path: Path, seconds: float) -> dict[str, float]:
    """An event until the page has it, and what a page costs that somebody looks at."""
    source = Source(path)
    thread = threading.Thread(target=source.run)
    thread.start()
    time.sleep(1.0)
    took: list[float] = []
    try:
        with page_of(path) as (url, pid), urllib.request.urlopen(f"{url}api/events", timeout=30) as news:
            until, before, began = time.monotonic() + seconds + 2.0, 0.0, 0.0
            seen = -1
            for line in news:
                if not line.startswith(b"data: "):
                    continue
                ended = json.loads(line[6:])["info"]["heads"]["trajectories"] // 8 + 31
                if seen >= 0 and ended > seen:
                    written = [source.written.get(f"p{each}") for each in range(seen + 1, ended + 1)]
                    took += [time.perf_counter() - at for at in written if at is not None]
                seen = ended
                if not began and time.monotonic() > until - seconds:
                    before, began = cpu_s(pid), time.monotonic()
                if time.monotonic() > until:
                    break
            watched = (cpu_s(pid) - before) / (time.monotonic() - began)
    finally:
        source.end()
        thread.join()
    took.sort()
    shown = {"event_to_page_s": took[int(0.99 * len(took))], "event_to_page_median_s": took[len(took) // 2]}
    return shown | {"watched_core": watched}


def painted(directory: Path) -> dict[str, float]:
    """In a browser, on loopback: until something is there to read, and until a view has changed after a click."""
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return {}
    with page_of(directory) as (url, _), sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        paints, clicks = list[float](), list[float]()
        for _ in range(5):
            page = browser.new_page()
            page.goto(url)
            page.wait_for_selector(".buffer")
            paints.append(page.evaluate(PAINT))
            clicks.append(page.evaluate(CLICK))
            page.close()
        browser.close()
    return {"first_paint_s": statistics.median(paints), "interaction_ms": statistics.median(clicks)}


PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime / 1e3"
CLICK = """() => new Promise((done) => {
  const began = performance.now();
  document.querySelector("nav a[data-view=timeline]").click();
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)));
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--instances", type=amounts.count, default=1000)
    parser.add_argument("--trajectories", type=amounts.count, default=1_000_000)
    parser.add_argument("--run", type=Path, help="where the simulated run is, or is kept")
    parser.add_argument("--seconds", type=amounts.amount, default=20.0, help="for which CPU is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="staleflow-bench-") as folder:
        path = options.run or Path(folder) / "large"
        directory = RunDirectory(path) if path.exists() else record(path, options.instances, options.trajectories)
        found: dict[str, Any] = large(directory, options.seconds)
        found |= alive(Path(folder) / "alive", options.seconds) | painted(path)
    found["answer_ms"], found["load"] = max(found["answers_ms"].values()), os.getloadavg()[0]
    found["assets_bytes"] = sum(each.stat().st_size for each in PAGE.iterdir())
    found["met"] = {name: found[name] <= most for name, most in TARGETS.items() if name in found}
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(name)
            for what, each in value.items():
                print(f"  {what:26} {each if isinstance(each, bool) else f'{each:.3g}'}")
        else:
            print(f"{name:28} {value:,.4g}" + (f"  (at most {TARGETS[name]:g})" if name in TARGETS else ""))


if __name__ == "__main__":
    main()
