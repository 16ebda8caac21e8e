"""Who stands still: what each process was asked to do, how long that normally takes, and how long it has taken.

    watchdog.asked("trainer", "train", "step 12", now, size=5300)   # size: what the duration grows with, tokens say
    watchdog.moved("trainer", now)                                  # it has done a part of something
    watchdog.done("trainer", "train", now)
    for each in watchdog.look(now): ...                             # who has stood still for longer than is normal

A live process says nothing about progress: one that is stopped, deadlocked or thrashing is as alive as any other. So a
process counts as moving only when it says what it has finished. How long a kind of work normally goes without a word is
the longest silence of its recent ones, by size; a process is *late* after twice that and *lost* after ten times, with a
floor for both. The first work of a kind has no measure yet and gets the benefit of the doubt once the process is at it,
and so does the next one after a loss: if the process was only slow, its successor is given the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LATE_S = 4.0
"""Nobody is late before this."""
LATE = 2.0
LOST = 10.0
"""Times the normal silence."""
FIRST_S = 30.0
"""Silence in the first work of a kind before it is late: kernels are compiled, files are read."""
FIRST_LOST_S = 600.0
FADES = 0.9
"""How much of the longest silence seen is left after each further work."""


@dataclass(slots=True)
class Looks:
    """Looks that are to come ``interval_s`` apart. If one comes much later, this process stood still itself (Ctrl-Z, a
    job that was suspended), and for that time nobody is to blame."""

    interval_s: float
    last: float | None = None

    def stood_still(self, now: float) -> float:
        """For how long, since the look before this one."""
        before, self.last = self.last, now
        late = 0.0 if before is None else now - before - self.interval_s
        return late if late > 2 * self.interval_s else 0.0


@dataclass(slots=True)
class _Asked:
    what: str
    size: float
    begun: bool
    """Whether the process may be at it; else other work comes first."""
    silence_s: float = 0.0
    """The longest between two signs of life."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """A process that has not moved for longer than is normal."""

    name: str
    what: str
    """What it was asked to do."""
    seconds: float
    """Since it last moved."""
    limit_s: float
    """When it is lost."""
    news: bool = True
    """Whether this look is the first to find it."""

    @property
    def lost(self) -> bool:
        return self.seconds >= self.limit_s

    def __str__(self) -> str:
        return f"{self.name} has not moved for {self.seconds:.0f} s ({self.what}); replaced after {self.limit_s:.0f} s"


@dataclass(slots=True)
class Watchdog:
    lost_s: float = 30.0
    """No process is lost before this."""
    interval_s: float = 1.0
    """How often ``look`` is called."""
    _asked: dict[str, dict[str, _Asked]] = field(default_factory=dict[str, dict[str, _Asked]])
    _moved: dict[str, float] = field(default_factory=dict[str, float])
    _slowest: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """By process and kind of work: seconds of silence for each unit of size."""
    _named: set[str] = field(default_factory=set[str])
    """Those that were found late and have not moved since."""
    _looks: Looks = field(init=False)

    def __post_init__(self) -> None:
        self._looks = Looks(self.interval_s)

    def asked(self, name: str, kind: str, what: str, now: float, size: float = 1.0, begun: bool = True) -> None:
        """Something more to do. Work of one kind adds up until it is done. ``begun``: False if the process says when it
        begins with it."""
        works = self._asked.setdefault(name, {})
        if not works:
            self._moved[name] = now
        if (before := works.get(kind)) is not None:
            before.what, before.size = what, before.size + size
        else:
            works[kind] = _Asked(what, size, begun)

    def begun(self, name: str, kind: str) -> None:
        """The process is at work of this kind now."""
        if (asked := self._asked.get(name, {}).get(kind)) is not None:
            asked.begun = True

    def normal(self, name: str, kind: str, silence_s: float) -> None:
        """How long this normally goes without a word, known from elsewhere."""
        self._slowest[name, kind] = silence_s

    def busy(self, name: str) -> bool:
        return bool(self._asked.get(name))

    def moved(self, name: str, now: float) -> None:
        silence_s = now - self._moved.get(name, now)
        for asked in self._asked.get(name, {}).values():
            asked.silence_s = max(asked.silence_s, silence_s)
        self._moved[name] = now
        self._named.discard(name)

    def done(self, name: str, kind: str, now: float) -> None:
        """All that was asked of this kind has been done."""
        self.moved(name, now)
        if (asked := self._asked.get(name, {}).pop(kind, None)) is not None:
            self._measured(name, kind, asked)

    def forget(self, name: str, now: float | None = None) -> None:
        """It is gone: another takes its place, and is asked anew. What was measured stays. ``now``: it was lost, and
        the silence counts, should it only have been slow."""
        if now is not None:
            self.moved(name, now)
            for kind, asked in self._asked.get(name, {}).items():
                self._measured(name, kind, asked)
        self._asked.pop(name, None)
        self._moved.pop(name, None)
        self._named.discard(name)

    def look(self, now: float) -> list[Standstill]:
        """Everybody who has work and has not moved for longer than is normal."""
        if stood_still := self._looks.stood_still(now):
            self._moved = {name: min(now, at + stood_still) for name, at in self._moved.items()}
        found: list[Standstill] = []
        for name, works in self._asked.items():
            seconds = now - self._moved[name]
            if not works or seconds < LATE_S:
                continue
            paces = {kind: self._slowest.get((name, kind)) for kind in works}
            normal = sum(pace * works[kind].size for kind, pace in paces.items() if pace)
            begun = [kind for kind in works if works[kind].begun] or works
            first = any(paces[kind] is None for kind in begun)
            if seconds >= max(LATE_S, LATE * normal, FIRST_S if first else 0.0):
                what = ", ".join(asked.what for asked in works.values())
                limit = max(self.lost_s, LOST * normal, FIRST_LOST_S if first else 0.0)
                found.append(Standstill(name, what, seconds, limit, news=name not in self._named))
                self._named.add(name)
        return found

    def _measured(self, name: str, kind: str, asked: _Asked) -> None:
        pace = asked.silence_s / max(asked.size, 1e-9)
        self._slowest[name, kind] = max(pace, FADES * self._slowest.get((name, kind), 0.0))
