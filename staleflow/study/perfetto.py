"""The timeline of a run as a trace that ui.perfetto.dev and chrome://tracing open (Chrome's JSON format).

    write_trace(directory, Path("trace.json"), first=10, last=20)

Tracks: the trainer (each step: groups arrive, then update and push), every instance with a lane for each response that
it runs at once, its pulls and deaths, how much it runs; rewards being scored; evaluations. Time is that of training.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from staleflow.files import write_whole
from staleflow.run.directory import RunDirectory
from staleflow.run.events import Timed, read_commits, read_events
from staleflow.study.why.lives import Lives
from staleflow.study.why.moments import moments

TRAINER, EVALUATOR, REWARDS, FLEET = 1, 2, 3, 10
"""Numbers of the processes in the trace; instances come from ``FLEET`` on."""
MOST_MOMENTS = 2000
INSTANTS = {"join": "joins", "lost": "is lost", "left": "leaves", "pull": "has pulled"}

TraceEvent = dict[str, Any]


def write_trace(directory: RunDirectory, path: Path, first: int = 0, last: int | None = None, bound: int = 0) -> int:
    """What happened during steps ``first`` to ``last``, ``bound`` the run's; the number of events written."""
    commits = {each.step: each for each in read_commits(directory)}
    before, opened = commits.get(first - bound - 2), commits.get(first - 1)  # nothing that runs was begun earlier
    ended = commits.get(last) if last is not None else None
    start, stop = before.first if before else 0, ended.last if ended else 1 << 62
    read = list(read_events(directory, first=start, last=stop))
    lives = Lives(read, before.time if before else 0.0)
    within = (opened.time if opened else 0.0), (ended.time if ended else lives.time)
    events = [each for each in read if within[0] <= each.time <= within[1]]
    steps = {step: time for step, time in lives.commits.items() if step >= first and (last is None or step <= last)}
    found = [*_trainer(lives, steps, within[0]), *_fleet(directory, lives, events, within), *_evaluations(events)]
    write_whole(path, msgspec.json.encode({"traceEvents": found, "displayTimeUnit": "ms"}).decode())
    return len(found)


def _slice(name: str, begin: float, end: float, pid: int, tid: int, **facts: Any) -> TraceEvent:
    first, last = _drawn(begin, end)
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": first, "dur": last - first, "args": facts}


def _drawn(begin: float, end: float) -> tuple[int, int]:
    """In whole microseconds, at least one."""
    first = round(1e6 * begin)
    return first, max(first + 1, round(1e6 * end))


def _named(pid: int, name: str, threads: Iterable[tuple[int, str]] = ()) -> Iterator[TraceEvent]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    for tid, each in threads:
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": each}}


def _trainer(lives: Lives, steps: dict[int, float], begin: float) -> Iterator[TraceEvent]:
    yield from _named(TRAINER, "trainer", [(1, "steps"), (2, "parts")])
    opened = begin
    for step, committed in sorted(steps.items()):
        groups = lives.of_step(step)
        full = max((group.leased or opened for group in groups), default=opened)
        yield _slice(f"step {step}", opened, committed, TRAINER, 1, groups=len(groups))
        if full > opened:
            yield _slice("groups arrive", opened, full, TRAINER, 2, step=step)
        if committed > full:
            yield _slice("update and push", full, committed, TRAINER, 2, step=step)
        opened = committed


def _fleet(
    directory: RunDirectory, lives: Lives, events: Iterable[Timed], within: tuple[float, float]
) -> Iterator[TraceEvent]:
    spells = [
        (spell, life)
        for life in lives.trajectories.values()
        for spell in life.spells(lives.time)
        if spell.end >= within[0] and spell.begin <= within[1]
    ]
    names = sorted({spell.instance for spell, _ in spells if spell.instance}, key=lambda name: (len(name), name))
    pids = {name: FLEET + at for at, name in enumerate(names)} | {"": REWARDS}
    lanes = _Lanes()
    for spell, life in sorted(spells, key=lambda each: each[0].begin):
        if spell.doing != "waits for an instance":
            lane = lanes.take(spell.instance, *_drawn(spell.begin, spell.end))
            facts = {"tokens": life.tokens, "versions": life.spans, "moves": life.moves}
            yield _slice(life.name, spell.begin, spell.end, pids[spell.instance], lane, **facts)
    for name, pid in pids.items():
        tracks = [(lane, f"lane {lane}") for lane in range(1, 1 + lanes.count(name))]
        yield from _named(pid, name or "rewards", tracks)
    for time, event in events:
        if event[0] in INSTANTS and event[1] in pids:
            what = f"{INSTANTS[event[0]]}{f' version {event[2]}' if event[0] == 'pull' else ''}"
            yield {"name": what, "ph": "i", "s": "p", "ts": round(1e6 * time), "pid": pids[event[1]], "tid": 1}
    for moment in moments(directory, most=MOST_MOMENTS):
        if within[0] <= moment.time <= within[1]:
            for each in moment.instances:
                if each.name in pids:
                    load = {"running": each.running, "waiting": each.waiting}
                    yield {
                        "name": "load",
                        "ph": "C",
                        "ts": round(1e6 * moment.time),
                        "pid": pids[each.name],
                        "args": load,
                    }


class _Lanes:
    """The lowest lane of an instance that is free: slices of one track must not overlap."""

    def __init__(self) -> None:
        self._busy: dict[str, list[tuple[int, int]]] = {}
        self._free: dict[str, list[int]] = {}
        self._count: dict[str, int] = {}

    def take(self, instance: str, begin: int, end: int) -> int:
        busy, free = self._busy.setdefault(instance, []), self._free.setdefault(instance, [])
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = self._count[instance] = self._count.get(instance, 0) + 1
        heapq.heappush(busy, (end, lane))
        return lane

    def count(self, instance: str) -> int:
        return self._count.get(instance, 0)


def _evaluations(events: Iterable[Timed]) -> Iterator[TraceEvent]:
    asked: dict[int, float] = {}
    for time, event in events:
        if event[0] == "evaluating":
            asked[event[1]] = time
        elif event[0] == "evaluated":
            facts = {"accuracy": event[2]}
            yield _slice(f"version {event[1]}", asked.get(event[1], time), time, EVALUATOR, 1, **facts)
    if asked:
        yield from _named(EVALUATOR, "evaluator")
