"""The figures of a run as other programs show them: every step and evaluation goes to each tracker of the run.

    trackers = Trackers({"wandb": lambda: WeightsAndBiases(run, project="mine")}, tell=print)
    trackers.log(12, {"reward": 0.31, "lengths": [7, 112], "token_staleness": {0: 61, 1: 30}})
    trackers.close()

A thread calls them, so that a slow one delays nothing; what it has not taken when ``MOST_WAITING`` steps wait is left
out. One that fails is named in a line and left out from then on: showing a run must never end it.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from staleflow.errors import line_of

MOST_WAITING = 256
CLOSE_S = 30.0
"""How long the end of a run waits for trackers, all together."""

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of its run."""

    name: str
    path: Path
    """Its directory."""
    first_step: int = 0
    """The step that comes next: those before it are known already."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Tracker(Protocol):
    def log(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class Trackers:
    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], tell: Callable[[str], None]) -> None:
        """``makers``: by name; they are called by the thread, since opening some takes seconds. ``tell`` gets a line
        for each that fails, from the thread as well."""
        self._makers = makers
        self._tell = tell
        self._waiting: queue.Queue[tuple[int, Values] | None] = queue.Queue()
        self._full = False
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        if makers:
            self._thread.start()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        if not self._thread.is_alive():
            return
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((step, scalars(row)))
        elif not self._full:
            self._full = True
            self._tell(f"trackers ({', '.join(self._makers)}) are too slow: some steps are left out there")

    def close(self) -> None:
        """Let them take what is left. May be called again."""
        if not self._thread.is_alive():
            return
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._tell(f"trackers ({', '.join(self._makers)}) did not end within {CLOSE_S:g} s and are left behind")

    def _work(self) -> None:
        trackers: dict[str, Tracker] = {}
        for name, make in self._makers.items():
            if (made := self._safely(name, make)) is not None:
                trackers[name] = made
        while (item := self._waiting.get()) is not None:
            for name, tracker in list(trackers.items()):
                if self._safely(name, lambda tracker=tracker, item=item: (tracker.log(*item), True)) is None:
                    del trackers[name]
        for name, tracker in trackers.items():
            self._safely(name, tracker.close)

    def _safely(self, name: str, act: Callable[[], Any]) -> Any:
        """The result; None after an error."""
        try:
            return act()
        except Exception as error:  # whatever another program raises
            self._tell(f"track={name} failed and is left out from now on ({line_of(error)})")
            return None


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of ``metrics.jsonl``; what is a list or a histogram there, by its mean and its largest."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, bool) or name == "step":
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
        elif isinstance(value, Mapping) and name.endswith("_staleness") and value:
            ages = {int(age): count for age, count in value.items()}
            found[f"{name}/mean"] = sum(age * count for age, count in ages.items()) / max(1, sum(ages.values()))
            found[f"{name}/max"] = float(max(ages))
        elif name == "lengths" and isinstance(value, list) and value:
            found |= {"lengths/mean": fmean(value), "lengths/max": float(max(value))}
    return found
