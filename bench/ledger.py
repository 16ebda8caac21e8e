"""How fast the staleness ledger is, and how that grows with live groups and with the bound.

    python bench/ledger.py            # a table
    python bench/ledger.py --json     # the same as JSON

Each cell keeps a ledger full at the given number of live groups and drives it through whole training steps: the
groups that are due finish in random order (so that large sizes pay for their cache misses) and are taken one by one,
the step is committed, and as many new groups are reserved; a tenth of them is lowered, renewed, and released and
replaced. Every call counts as one operation. Figures are medians of repeats.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import amounts
from staleflow.protocol import StalenessLedger

TARGET = 300_000
"""Operations per second, on one core."""
FLAT = 2.0
"""Largest ratio between the speeds at 1e3 and 1e6 live groups."""
LIVE = (100, 1_000, 10_000, 100_000, 1_000_000)
STALENESS = (1, 4, 16, 64)
OPERATIONS = 200_000
"""The least number of operations in a repeat."""


class Driver:
    """A full ledger and, oldest version first, the groups in flight in it."""

    def __init__(self, live: int, staleness: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = StalenessLedger(max(1, live // (staleness + 1)), staleness)
        self.cohorts: deque[list[str]] = deque()
        self.names = 0
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        for _ in range(staleness):
            self._admit()
            self._train(self._admit_extra())
        self._admit()
        self.seconds, self.calls = {}, {}

    def step(self) -> None:
        self._train(self.cohorts.popleft())
        self._admit()

    def _admit_extra(self) -> list[str]:
        """Groups to train at start-up, so that versions appear while older groups stay in flight."""
        names = self._new_names(self.ledger.batch_size)
        for name in names:
            assert self.ledger.reserve(name, self.ledger.version)
        return names

    def _train(self, due: list[str]) -> None:
        ledger = self.ledger
        self.random.shuffle(due)
        self._time("occupy", ledger.occupy, due)
        self._time("ready", lambda _: ledger.ready(), due)
        self._time("take", lambda _: ledger.take(1), due)
        self._time("commit", ledger.commit, [ledger.version])

    def _admit(self) -> None:
        ledger, names = self.ledger, self._new_names(self.ledger.batch_size)
        some = names[: max(1, len(names) // 10)]
        older = max(0, ledger.version - 1)
        self._time("reserve", lambda name: ledger.reserve(name, ledger.version), names)
        self._time("lower", lambda name: ledger.lower(name, older), some)
        self._time("renew", lambda name: ledger.renew(name, ledger.version), some)
        self._time("room", lambda _: ledger.room(older), some)
        self._time("release", lambda name: ledger.release(name, "filtered"), some)
        fresh = self._new_names(len(some))
        self._time("reserve", lambda name: ledger.reserve(name, ledger.version), fresh)
        self.cohorts.append(names[len(some) :] + fresh)

    def _new_names(self, count: int) -> list[str]:
        self.names += count
        return [f"group-{number}" for number in range(self.names - count, self.names)]

    def _time(self, name: str, call: Callable[[Any], object], arguments: list[Any]) -> None:
        start = time.perf_counter()
        for argument in arguments:
            call(argument)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.calls[name] = self.calls.get(name, 0) + len(arguments)


def measure(live: int, staleness: int, repeats: int) -> dict[str, Any]:
    """One cell: operations per second, and nanoseconds for each kind of call."""
    driver = Driver(live, staleness, seed=live + staleness)
    assert driver.ledger.counts()["live"] == driver.ledger.batch_size * (staleness + 1)
    gc.collect()
    speeds: list[float] = []
    nanoseconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        driver.seconds, driver.calls = {}, {}
        while sum(driver.calls.values()) < OPERATIONS:
            driver.step()
        speeds.append(sum(driver.calls.values()) / sum(driver.seconds.values()))
        for name, calls in driver.calls.items():
            nanoseconds.setdefault(name, []).append(driver.seconds[name] / calls * 1e9)
    return {
        "live": driver.ledger.counts()["live"],
        "staleness": staleness,
        "operations_per_s": round(statistics.median(speeds)),
        "nanoseconds": {name: round(statistics.median(values)) for name, values in nanoseconds.items()},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest cell, and per bound how much slower 1e6 live groups are than 1e3."""
    speed = {(row["wanted"], row["staleness"]): row["operations_per_s"] for row in rows}
    growth = {
        str(staleness): round(speed[1_000, staleness] / speed[1_000_000, staleness], 2)
        for staleness in sorted({row["staleness"] for row in rows})
        if (1_000, staleness) in speed and (1_000_000, staleness) in speed
    }
    slowest = min(speed.values())
    return {
        "slowest_operations_per_s": slowest,
        "slowdown_1e3_to_1e6": growth,
        "target_operations_per_s": TARGET,
        "target_slowdown": FLAT,
        "targets_met": slowest >= TARGET and all(value <= FLAT for value in growth.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=amounts.count, default=3, help="repeats for each cell (default 3)")
    parser.add_argument("--live", type=amounts.count, nargs="+", default=LIVE, help="live groups")
    parser.add_argument("--staleness", type=amounts.whole, nargs="+", default=STALENESS, help="bounds")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for staleness in options.staleness:
        for live in options.live:
            rows.append({"wanted": live, **measure(live, staleness, options.repeats)})
    result = {"rows": rows, **summary(rows)}
    print(json.dumps(result, indent=1) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    names = list(result["rows"][0]["nanoseconds"])
    lines = ["     live  staleness      ops/s   ns per call: " + "".join(f"{name:>9}" for name in names)]
    for row in result["rows"]:
        cells = "".join(f"{row['nanoseconds'].get(name, 0):9}" for name in names)
        lines.append(f"{row['live']:9,}  {row['staleness']:9}  {row['operations_per_s']:9,}                {cells}")
    lines.append(f"slowest cell {result['slowest_operations_per_s']:,} ops/s (target {TARGET:,}); ")
    lines[-1] += f"slowdown 1e3 to 1e6 by staleness {result['slowdown_1e3_to_1e6']} (target {FLAT})"
    return "\n".join(lines)


if __name__ == "__main__":
    main()
