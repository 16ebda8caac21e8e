"""What the experiments on a GPU share: results that are resumed, and whole runs of ``staleflow train``.

    results = Results(Path("system.json"), limit_s=480)
    results.measure("bound 2", lambda: observed(train(folder, "2", "one-gpu", ["staleness=2"]), 2, instances=2))

Every result is written at once; what is in the file is not measured again, and nothing is begun after the time limit.
"""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench import kept

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 300
"""Time limit of one run."""
KEPT = ("metrics.jsonl", "summary.json", "profile.json", "config.yaml")
"""What is kept of a run: enough to be simulated."""


class Results:
    """A file of results by name."""

    def __init__(self, path: Path | None, limit_s: float = float("inf")) -> None:
        self._path = path
        self._end = time.monotonic() + limit_s
        self.found: dict[str, Any] = kept.read(path)

    def measure(self, name: str, call: Callable[[], Any]) -> Any:
        """None if there is no time left for it."""
        if name not in self.found and time.monotonic() < self._end:
            self.found[name] = call()
            print(f"{name}: {json.dumps(self.found[name])[:300]}", flush=True)
            kept.write(self._path, self.found)
        return self.found.get(name)

    def head(self) -> None:
        """When, on what, with which versions and by which command."""
        self.measure("run", about)


def about() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    found = {"date": time.strftime("%Y-%m-%d"), "device": device, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "trl"):
        try:
            found[package] = torch.__version__ if package == "torch" else importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"command": " ".join(["python", *sys.argv])}


class Sampled:
    """The card's own count of how busy it is, four times a second, while the block runs."""

    def __init__(self) -> None:
        self.percent: list[int] = []
        """Of each quarter of a second, the share in which a kernel ran."""

    def __enter__(self) -> "Sampled":
        ask = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "250"]
        self._process = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True) if shutil.which(ask[0]) else None
        return self

    def __exit__(self, *_unused: object) -> None:
        if self._process is not None:
            self._process.terminate()
            said, _ = self._process.communicate(timeout=10)
            self.percent = [int(line) for line in said.split() if line.isdigit()]


def train(folder: Path, name: str, preset: str, words: Iterable[str]) -> Path:
    """The directory of a run; made if it is not there. Its checkpoints are not kept."""
    made = folder.resolve() / name  # the command runs in another folder
    if not (made / "summary.json").is_file():
        command = [sys.executable, "-c", "from staleflow.cli import main; raise SystemExit(main())", "train", preset]
        runs = made.with_name(f"{name}.run")
        done = subprocess.run(
            [*command, "--json", f"runs={runs}", *words],
            cwd=ROOT, timeout=MOST_S, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
        made.mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            if (runs / "latest" / file).is_file():
                shutil.copy(runs / "latest" / file, made / file)
        shutil.rmtree(runs)
    return made
