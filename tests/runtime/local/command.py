"""``staleflow train`` as a program: its supervisor, its control plane, and the processes of its run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.observe.metrics import read_metrics
from staleflow.run.processes import processes

LIMIT_S = 240.0


class Training:
    def __init__(self, runs: Path, *words: str) -> None:
        """``runs``: of the configuration, whose ``latest`` is this run once it has begun."""
        self._latest = runs / "latest"
        self._log = runs.with_name(f"{runs.name}.log").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "staleflow", "train", *words, "--json"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @property
    def run(self) -> Path:
        return self._latest.resolve()

    @property
    def roles(self) -> dict[str, int]:
        """The pids of the run's processes."""
        return {each.name: each.pid for each in processes(self.run)}

    @property
    def control(self) -> int:
        """The pid of the control plane's process; 0 if there is none. It is a fork of its supervisor, which is also the
        parent of whatever a control plane left when it died: reward workers that are about to end, for one."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next((int(pid) for pid in found if command_of(int(pid)) == command_of(self.process.pid)), 0)

    @property
    def control_has_pytorch(self) -> bool:
        return "libtorch" in Path(f"/proc/{self.control}/maps").read_text()

    @property
    def steps(self) -> int:
        """That have been committed."""
        metrics = self.run / "metrics.jsonl"
        return len(read_metrics(metrics)) if metrics.exists() else 0

    def until(self, what: Callable[[], Any]) -> None:
        began = time.monotonic()
        while not what():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() - began < LIMIT_S, self.said()
            time.sleep(0.005)

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def summary(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, self.said()
        return json.loads(out)

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read()


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
