"""The lines of ``metrics.jsonl`` as series to draw, with no more points than a screen has.

steps = Steps(directory.metrics)
steps.read_on()
steps.series(600)           # {"step": [...], "reward": [...], ...}
steps.ages(300)             # staleness of the tokens and trajectories of each step
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from staleflow.dash.lines import Lines

Numbers = dict[str, float]


class Ages(msgspec.Struct):
    """By step: how many were so old. ``tokens[i][a]``: of the ``i``-th point, tokens of age ``a``."""

    step: list[int]
    tokens: list[list[int]]
    trajectories: list[list[int]]


class Steps:
    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._rows: dict[int, Numbers] = {}
        self._ages: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
        self.tokens = 0
        """Trained on so far."""

    def read_on(self) -> bool:
        """Whether something was new."""
        news = False
        while True:
            again, lines = self._lines.read()
            if again:
                self._rows, self._ages, self.tokens = {}, {}, 0
            for line in lines:
                try:
                    row = msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                if isinstance(row, dict) and isinstance(step := row.get("step"), int):
                    self._add(step, row)
            news = news or again or bool(lines)
            if not lines:
                return news

    def _add(self, step: int, row: dict[str, Any]) -> None:
        while self._rows and (latest := next(reversed(self._rows))) >= step:  # they are made again
            del self._rows[latest]
            self.tokens -= sum(self._ages.pop(latest)[0].values())
        self._rows[step] = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if lengths := row.get("lengths"):
            self._rows[step] |= {"longest": float(max(lengths)), "shortest": float(min(lengths))}
        self._ages[step] = row.get("token_staleness") or {}, row.get("trajectory_staleness") or {}
        self.tokens += sum(self._ages[step][0].values())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last(self) -> Numbers:
        return next(reversed(self._rows.values()), {})

    @property
    def made(self) -> int:
        """Steps of the run that are made."""
        return next(reversed(self._rows), -1) + 1

    def work(self, begin: float, end: float, most: int) -> list[tuple[float, float, int, float, float]]:
        """Of the steps in this time: begin, end, step, seconds of work and of waiting in it; at most the last ones."""
        found, before = list[tuple[float, float, int, float, float]](), 0.0
        for step, row in self._rows.items():
            at = row.get("time", 0.0)
            if at >= begin and before <= end:
                found.append((min(before, at), at, step, row.get("train_s", 0.0), row.get("idle_s", 0.0)))
            before = at
        return found[-most:]

    def series(self, points: int) -> dict[str, list[float | None]]:
        """Means over runs of equally many steps."""
        names = dict.fromkeys(name for row in self._rows.values() for name in row)
        parts = self._parts(points)
        return {name: [_mean([self._rows[step].get(name) for step in part]) for part in parts] for name in names}

    def ages(self, points: int) -> Ages:
        parts = self._parts(points)
        oldest = max((int(age) for pair in self._ages.values() for ages in pair for age in ages), default=0)
        sums = [[Counter[int](), Counter[int]()] for _ in parts]
        for part, pair in zip(parts, sums, strict=True):
            for step in part:
                for ages, total in zip(self._ages[step], pair, strict=True):
                    for age, count in ages.items():
                        total[int(age)] += count
        tokens, trajectories = ([[pair[at][age] for age in range(oldest + 1)] for pair in sums] for at in (0, 1))
        return Ages([part[0] for part in parts], tokens, trajectories)

    def _parts(self, points: int) -> list[list[int]]:
        steps = list(self._rows)
        size = -(-len(steps) // max(1, points)) or 1
        return [steps[at : at + size] for at in range(0, len(steps), size)]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
