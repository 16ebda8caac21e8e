"""What the time of a run went to: seconds of training, of the control plane, and of every process.

time = TimeSpent(run)
time.begin()                     # training begins
time.count_instances()           # before their number changes
time.so_far()                    # the record's counters, if the run ended now
time.end()                       # puts them into the record
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.runtime.local.run import LocalRun


class TimeSpent:
    def __init__(self, run: LocalRun) -> None:
        self.began = 0.0
        """When training did in this attempt of the run; 0 before."""
        self.before_s = 0.0
        """Seconds of training in earlier attempts."""
        self._run = run
        self._cpu_began = self._shown_began = self._counted_at = 0.0
        self._cpu_before: dict[str, float] = {}
        """By process, CPU seconds when training began."""

    @property
    def seconds(self) -> float:
        """Of training, in all attempts."""
        return self.before_s + (time.monotonic() - self.began if self.began else 0.0)

    @property
    def control_s(self) -> float:
        """CPU seconds of this process for the run since training began; what people look at does not count."""
        if not self.began:
            return 0.0
        return time.process_time() - self._cpu_began - (self._run.watching.shown_s - self._shown_began)

    @property
    def control_share(self) -> float:
        """Of one core, in this attempt of the run."""
        return self.control_s / max(1e-9, time.monotonic() - self.began)

    @property
    def instance_busy_s(self) -> float:
        """Of all instances there have been."""
        return self._run.record.instance_busy_s + sum(port.busy_s for port in self._run.instances.values())

    def begin(self) -> None:
        self.began = self._counted_at = time.monotonic()
        self._run.journal.stamp_from(self.before_s)
        self._cpu_began, self._shown_began = time.process_time(), self._run.watching.shown_s
        self._cpu_before = {name: child.cpu_s for name, child in self._run.crew.children.items()}

    def count_instances(self) -> None:
        """Seconds that instances were there, up to now. Call it before their number changes."""
        if self._run.training:
            now = time.monotonic()
            self._run.record.instance_s += len(self._run.instances) * (now - self._counted_at)
            self._counted_at = now

    def instance_left(self, name: str) -> None:
        """It is about to end for good."""
        run = self._run
        self.count_instances()
        if (port := run.instances.pop(name, None)) is not None:
            run.record.instance_busy_s += port.busy_s
        if run.training and name in run.crew.children:
            self._count_cpu(name)

    def so_far(self) -> dict[str, float]:
        """What the record's counters of time would be if the run ended now."""
        if not self.began:
            return {}
        self.count_instances()
        record = self._run.record
        return {
            "control_s": record.control_s + self.control_s,
            "instance_s": record.instance_s,
            "instance_busy_s": self.instance_busy_s,
            "tokens_lost": record.tokens_lost,
        }

    def end(self) -> None:
        record = self._run.record
        self.count_instances()
        record.seconds = self.seconds
        record.control_s += self.control_s
        record.instance_busy_s = self.instance_busy_s
        for name in self._run.crew.children:
            self._count_cpu(name)

    def _count_cpu(self, name: str) -> None:
        crew, record = self._run.crew, self._run.record
        used = crew.children[name].cpu_s
        if crew.incarnations[name] == 1:
            used -= self._cpu_before.get(name, 0.0)
        record.cpu_s[name] = record.cpu_s.get(name, 0.0) + used
