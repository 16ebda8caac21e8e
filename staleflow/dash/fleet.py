"""The load of instances over time, from ``fleet.jsonl``, read on as it grows and thinned out as it gets long.

history = FleetHistory(directory.fleet)
history.read_on()
history.latest                              # the newest Moment
history.columns(0.0, 60.0, 400, ["i0"])     # what i0 did in each 400th of that time
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from staleflow.dash.lines import Lines
from staleflow.run.fleet import InstanceMoment, Moment

MOST_CELLS = 4_000_000
"""Instances times moments that are kept; beyond, every other moment is dropped."""

GAP_S = 5.0
"""Where nothing is known of a run for so long, it did not run."""

Cell = tuple[int, int, str]
"""Running, version, doing."""


class FleetHistory:
    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._decoder = msgspec.json.Decoder(Moment)
        self.latest: Moment | None = None
        self.times: list[float] = []
        self._moments: list[dict[str, Cell]] = []
        self._cells = 0
        self._every = 0.0
        self._rates: dict[str, tuple[float, int, float]] = {}
        """By instance: when its tokens were looked at, how many there were, and tokens per second before that."""
        self.names: list[str] = []
        """Of every instance there has been, in the order in which they came."""
        self._known: set[str] = set()

    def read_on(self) -> bool:
        """Whether something was new."""
        news = False
        while (found := self._lines.read())[1]:
            for line in found[1]:
                try:
                    self._add(self._decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError):  # torn
                    continue
                news = True
        return news

    def _add(self, moment: Moment) -> None:
        self.latest = moment
        for each in moment.instances:
            if each.name not in self._known:
                self._known.add(each.name)
                self.names.append(each.name)
            self._rate(moment.time, each)
        if self.times and self.times[-1] <= moment.time < self.times[-1] + self._every:
            return
        self.times.append(moment.time)
        self._moments.append({each.name: (each.running, each.version, each.doing) for each in moment.instances})
        self._cells += len(moment.instances)
        if self._cells > MOST_CELLS:
            self.times, self._moments = self.times[::2], self._moments[::2]
            self._cells = sum(map(len, self._moments))
            self._every = 1.5 * (self.times[-1] - self.times[0]) / len(self.times)

    def _rate(self, time: float, each: InstanceMoment) -> None:
        """Over about two seconds: what came in a fraction of one says little."""
        since, tokens, rate = self._rates.get(each.name, (time, each.tokens, 0.0))
        if each.tokens < tokens or time < since:  # another incarnation, or another attempt of the run
            since, tokens, rate = time, each.tokens, 0.0
        elif time - since >= 2.0:
            since, tokens, rate = time, each.tokens, (each.tokens - tokens) / (time - since)
        self._rates[each.name] = since, tokens, rate

    def tokens_per_s(self, name: str) -> float:
        return self._rates[name][2] if name in self._rates else 0.0

    def columns(self, begin: float, end: float, count: int, names: Sequence[str]) -> list[list[Cell | None]]:
        """For each instance, what it did at the end of each of ``count`` equal parts of that time; None: not there."""
        width = max(1e-9, (end - begin) / count)
        chosen: list[dict[str, Cell] | None] = [None] * count
        before: dict[str, Cell] | None = None
        for time, moment in zip(self.times, self._moments, strict=True):
            if time < begin:
                before = moment
            elif time <= end:
                chosen[min(count - 1, int((time - begin) / width))] = moment
        simulated = self.latest is not None and not self.latest.at  # then nothing happens between two moments
        gap = float("inf") if simulated else max(GAP_S, 4 * width, 3 * self._every)
        last, last_at = before, begin
        for at, moment in enumerate(chosen):
            if moment is not None:
                last, last_at = moment, begin + at * width
            elif begin + at * width - last_at <= gap and (not self.times or begin + at * width <= self.times[-1]):
                chosen[at] = last
        return [[None if moment is None else moment.get(name) for moment in chosen] for name in names]
