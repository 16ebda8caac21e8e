"""Simulated runs in several processes, with the same results as in one.

A unit is a generator. It yields runs that do not depend on each other, continues when all of them are in ``runs``, and
returns its result. Units stay in this process and only runs are sent out, so nothing depends on how many processes
there are but the time it takes. Use::

    def unit() -> Unit[str]:
        yield [Run(name, "what it is", simulate, (policy, setting, seed))]
        return runs[name]["hash"]

    with Runner(runs, jobs=4) as runner:
        results = runner.finish([unit(), ...])

A run waits, then is under way, then is in ``runs``. What is there, or what another unit waits for, is not started
again. With more than one job, the script that calls this needs its ``if __name__ == "__main__"``: processes are
spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, TypeVar

Row = dict[str, Any]
T = TypeVar("T")

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Read when numpy is loaded: there is a process for each core already."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    """Its key in ``runs``."""
    what: str
    """A description for people."""
    call: Callable[..., Row]
    arguments: tuple[Any, ...]
    size: float = 1.0
    """Relative duration: the longest start first."""


Unit = Generator[Sequence[Run], None, T]


@dataclass(slots=True)
class Runner:
    runs: MutableMapping[str, Row]
    """Each run is put here as soon as it has ended."""
    jobs: int = 1
    on_run: Callable[[str], None] = lambda _: None
    """Called with a description of each run before it starts. If it raises, nothing more starts; what runs is kept."""
    on_share: Callable[[float], None] = lambda _: None
    """Called with the share of the work that is done."""
    foreseen: float = 0.0
    """Sizes of all runs that will be needed, as far as the caller can tell."""
    _ended: float = 0.0
    """Sizes of the runs that have ended."""
    _pool: _Pool | None = None

    def finish(self, units: Iterable[Unit[T]]) -> list[T]:
        """The results of all units. The first stage of every unit is known before anything runs."""
        agenda = _Agenda(list(units), self.runs, longest_first=self.jobs > 1)
        busy: dict[Future[Row], Run] = {}
        try:
            while agenda.waiting or busy:
                while agenda.waiting and len(busy) < self.jobs:
                    run = agenda.next()
                    self._announce(run, busy)
                    busy[self._start(run)] = run
                self._keep(wait(busy, return_when=FIRST_COMPLETED).done, busy, agenda)
        except BaseException:
            self._close(now=True)
            raise
        return agenda.results()

    def _announce(self, run: Run, busy: dict[Future[Row], Run]) -> None:
        try:
            self.on_run(run.what)
        except Exception:
            self._keep(wait(busy).done, busy)
            raise

    def _start(self, run: Run) -> Future[Row]:
        if self.jobs > 1:
            self._pool = self._pool or _Pool(self.jobs)
            return self._pool.submit(run)
        future: Future[Row] = Future()
        future.set_result(run.call(*run.arguments))
        return future

    def _keep(self, done: set[Future[Row]], busy: dict[Future[Row], Run], agenda: _Agenda[Any] | None = None) -> None:
        for future in done:
            run = busy.pop(future)
            self.runs[run.name] = future.result()
            self._ended += run.size
            if agenda is not None:
                agenda.ended(run)
                left = sum(each.size for _, _, each in agenda.waiting) + sum(each.size for each in busy.values())
                self.on_share(self._ended / max(self.foreseen, self._ended + left))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        self._close(now=kind is not None)

    def _close(self, now: bool) -> None:
        if self._pool is not None:
            self._pool.close(now)
            self._pool = None


@dataclass(slots=True)
class _Agenda(Generic[T]):
    """Which runs wait to be started, and which unit continues when they have ended."""

    units: list[Unit[T]]
    runs: MutableMapping[str, Row]
    longest_first: bool
    waiting: list[tuple[tuple[float, float], int, Run]] = field(default_factory=list)
    """A heap. Early stages come first, because most follows after them."""
    _asked: set[str] = field(default_factory=set[str])
    _lacks: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Names of the runs that each unit waits for."""
    _results: dict[int, T] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)
    _stages: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        for at in range(len(self.units)):
            self._advance(at)

    def next(self) -> Run:
        return heappop(self.waiting)[-1]

    def ended(self, run: Run) -> None:
        for at in [at for at, lacks in self._lacks.items() if run.name in lacks]:
            self._lacks[at].remove(run.name)
            if not self._lacks[at]:
                self._advance(at)

    def results(self) -> list[T]:
        return [self._results[at] for at in range(len(self.units))]

    def _advance(self, at: int) -> None:
        """Let the unit continue until it needs a run that is missing."""
        self._lacks.pop(at, None)
        try:
            while not (missing := [run for run in next(self.units[at]) if run.name not in self.runs]):
                pass
        except StopIteration as stop:
            self._results[at] = stop.value
            return
        self._lacks[at] = {run.name for run in missing}
        self._stages[at] = stage = self._stages.get(at, 0) + 1
        for run in missing:
            if run.name not in self._asked:
                self._asked.add(run.name)
                order = (stage, -run.size) if self.longest_first else (at, stage)
                heappush(self.waiting, (order, next(self._numbers), run))


class _Pool:
    """Processes that end when this one does, or on ``close``, even in the middle of a run."""

    def __init__(self, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        alive, self._held = context.Pipe(duplex=False)
        self._alive = alive
        self._executor = ProcessPoolExecutor(jobs, context, initializer=_watch, initargs=(alive,))

    def submit(self, run: Run) -> Future[Row]:
        with _starting():  # the executor starts its processes here
            return self._executor.submit(run.call, *run.arguments)

    def close(self, now: bool) -> None:
        if now:
            self._held.close()
        self._executor.shutdown(cancel_futures=True)
        self._held.close()
        self._alive.close()


@contextmanager
def _starting() -> Iterator[None]:
    """What new processes inherit: one thread for numpy, and Ctrl-C blocked, which this process handles."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _watch(alive: Connection) -> None:
    """In a new process: end as soon as the other side of the pipe is closed."""

    def end() -> None:
        alive.poll(None)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
