"""One run as the page sees it: follows its files, and answers questions about it. Typed answers: ``answers.py``.

view = RunView(0, directory)
view.follow()               # some of what is new; True: there is more
view.now(); view.learning(600); view.trajectory("p7/0")
"""

from __future__ import annotations

import time
from typing import Any

from staleflow.config import Config
from staleflow.dash import answers
from staleflow.dash.fleet import FleetHistory
from staleflow.dash.index import Index
from staleflow.dash.life import tell
from staleflow.dash.replica import bin_edge
from staleflow.dash.steps import Steps
from staleflow.dash.texts import Texts
from staleflow.errors import RunError
from staleflow.run.directory import RunDirectory
from staleflow.run.events import read_events
from staleflow.run.fleet import Moment
from staleflow.run.listing import state_of
from staleflow.servers.lifecycle import Group, Trajectory

MOST_CELLS = 512
"""Groups of a step's buffer in one answer."""
MOST_INSTANCES = 256
MOST_MARKS = 200
"""Of a lane."""
MOST_STEPS = 2_000
UNFINISHED = ("queued", "running", "interrupted", "waiting", "generated")


class RunView:
    def __init__(self, number: int, directory: RunDirectory, config: Config) -> None:
        self.id = number
        self.directory = directory
        self.config = config
        self.index = Index(directory)
        self.fleet = FleetHistory(directory.fleet)
        self.steps = Steps(directory.metrics)
        self.texts = Texts(directory.samples)
        self.changes = 0
        """Grows whenever something is new."""
        self._state = ("", 0.0)

    def follow(self) -> bool:
        """Read some of what is new. Whether there may be more."""
        place, (state, _) = self.index.place, self._state
        more = self.index.catch_up()
        with self.index.lock:
            news = [each.read_on() for each in (self.fleet, self.steps, self.texts)]
        if any(news) or self.index.place != place or self.state != state:
            self.changes += 1
        return more

    def close(self) -> None:
        self.index.close()

    # What the run is

    @property
    def state(self) -> str:
        """Looked at no more than once a second."""
        state, at = self._state
        if time.monotonic() - at > 1.0 or not state:
            state = state_of(self.directory, self.steps.made, self.config.steps)
            self._state = state, time.monotonic()
        return state

    def info(self) -> answers.RunInfo:
        moment, replica = self.fleet.latest, self.index.replica
        heads = answers.Heads(len(self.steps), len(self.texts), self.index.count(), self.index.behind)
        return answers.RunInfo(
            self.id,
            self.directory.path.name,
            str(self.directory.path),
            self.state,
            moment is not None and not moment.at,
            replica.book.ledger.version if replica else len(self.steps),
            self.config.steps,
            self.config.staleness if replica is None else replica.book.ledger.max_staleness,
            self.config.groups if replica is None else replica.book.ledger.batch_size,
            self.config.group_size,
            self.config.model,
            self.index.trouble,
            heads,
        )

    # Views

    def now(self) -> answers.Now:
        with self.index.lock:
            moment = self.fleet.latest or Moment(0.0)
            replica, last = self.index.replica, self.steps.last
            book = replica.book if replica else None
            accuracy = self._accuracy()
            return answers.Now(
                self.info(),
                max(moment.time, replica.now if replica else 0.0),
                moment.at,
                moment.doing,
                moment.trainer,
                moment.waiting_for,
                replica.blocked_since if replica else None,
                self._blockers(),
                self._buffers(),
                self._instances(moment),
                max(0, len(moment.instances) - MOST_INSTANCES),
                sum(each.state == "queued" for each in book) if book else 0,
                sum(each.state == "generated" for each in book) if book else 0,
                list(moment.notes),
                last.get("reward"),
                accuracy[-1][1] if accuracy else None,
                self.steps.tokens,
                sum(replica.wasted.values()) if replica else 0,
            )

    def _instances(self, moment: Moment) -> list[answers.InstanceNow]:
        return [
            answers.InstanceNow(
                each.name,
                None if each.version < 0 else each.version,
                each.running,
                each.waiting,
                each.kv_used,
                each.kv_total,
                self.fleet.tokens_per_s(each.name),
                each.doing,
            )
            for each in sorted(moment.instances, key=lambda each: (each.doing != "down", _natural(each.name)))[
                :MOST_INSTANCES
            ]
        ]

    def _buffers(self) -> list[answers.Buffer]:
        if (replica := self.index.replica) is None:
            return []
        book = replica.book
        ledger, found = book.ledger, list[answers.Buffer]()
        leased = set(book.leased)
        if ledger.frontier > ledger.version:
            found.append(self._buffer(ledger.version, "training", book.leased, leased))
        return found + [self._buffer(each.step, each.state, each.groups, leased) for each in ledger.view()]

    def _buffer(self, step: int, state: str, names: list[str], leased: set[str]) -> answers.Buffer:
        assert self.index.replica is not None
        book = self.index.replica.book
        cells = [_cell(book.groups[name], name in leased) for name in names[:MOST_CELLS] if name in book.groups]
        return answers.Buffer(step, state, book.ledger.batch_size, cells, max(0, len(names) - MOST_CELLS))

    def _blockers(self) -> list[answers.Blocker]:
        """Unfinished trajectories of the groups that the open step waits for, those with the most tokens first."""
        if (replica := self.index.replica) is None or replica.blocked_since is None:
            return []
        groups = [replica.book.groups[name] for name in replica.book.ledger.blocking() if name in replica.book.groups]
        members = [each for group in groups for each in group.members if each.state in UNFINISHED]
        members.sort(key=lambda each: each.generated, reverse=True)
        return [answers.Blocker(each.name, each.state, each.instance or "", each.generated) for each in members[:12]]

    def learning(self, points: int) -> answers.Learning:
        with self.index.lock:
            return answers.Learning(self.steps.series(points), self._accuracy())

    def _accuracy(self) -> list[tuple[int, float]]:
        marks = self.index.marks("evaluator", 0.0, float("inf"), MOST_STEPS)
        found = {int(version): float(accuracy) for version, accuracy, _ in (each.value.split() for each in marks)}
        return sorted(found.items())

    def staleness(self, points: int) -> answers.Staleness:
        with self.index.lock:
            info, replica, ages = self.info(), self.index.replica, self.steps.ages(points)
            if replica is None:
                return answers.Staleness(info.bound, ages, [], {}, {}, [])
            bins = sorted(replica.offered.keys() | replica.trained.keys())
            lengths = [answers.Bin(bin_edge(each), replica.offered[each], replica.trained[each]) for each in bins]
            wasted_at = sorted(replica.wasted_at.items())[-MOST_STEPS:]
            return answers.Staleness(info.bound, ages, lengths, dict(replica.wasted), dict(replica.released), wasted_at)

    def timeline(
        self, begin: float, end: float | None, columns: int, first_lane: int, lanes: int, pattern: str
    ) -> answers.Timeline:
        with self.index.lock:
            fleet = self.fleet
            last = max(fleet.times[-1] if fleet.times else 0.0, self.index.replica.now if self.index.replica else 0.0)
            end = min(last, end) if end is not None else last
            begin = max(0.0, min(begin, end))
            names = sorted((name for name in fleet.names if pattern in name), key=_natural)
            chosen = names[first_lane : first_lane + lanes]
            cells = fleet.columns(begin, end, columns, chosen)
            work = self.steps.work(begin, end, MOST_STEPS)
        shown = [
            answers.Lane(name, row, self._marks(name, begin, end, columns))
            for name, row in zip(chosen, cells, strict=True)
        ]
        of_evaluator = self.index.marks("evaluator", begin, float("inf"), MOST_MARKS)
        evaluated = [(each.time, *each.value.split()) for each in of_evaluator]
        return answers.Timeline(
            begin,
            end,
            0.0,
            last,
            max((cell[0] for row in cells for cell in row if cell), default=0),
            shown,
            len(names),
            work,
            [(float(b), t, int(version), float(value)) for t, version, value, b in evaluated if float(b) <= end],
            self._marks("run", begin, end, columns),
        )

    def _marks(self, lane: str, begin: float, end: float, columns: int) -> list[answers.LaneMark]:
        return [answers.LaneMark(*each) for each in self.index.marks_together(lane, begin, end, columns)]

    def samples(self, text: str, step: int | None, before: int, limit: int) -> answers.Found:
        return answers.Found(*self.texts.search(text, step, "", before, limit))

    def trajectories(self, **wanted: Any) -> answers.Listed:
        found, before = self.index.trajectories(**wanted)
        return answers.Listed([each._asdict() for each in found], before)

    def trajectory(self, name: str) -> answers.Life:
        """``RunError`` if there is none of this name."""
        index, group = self.index, name.rpartition("/")[0]
        with index.lock:
            live = index.replica.book.trajectories.get(name) if index.replica else None
            times = index.replica.live(name) if index.replica else None
            members = [_member(each) for each in live.group.members] if live else []
        ended = index.trajectory(name) if live is None else None
        if live is None and ended is None:
            raise RunError(f"there is no trajectory {name} in {self.directory.path.name}: names are like p17/3")
        if ended is not None:
            found, _ = index.trajectories(name=f"{group}/", limit=64)
            members = [(each.name, each.state, each.tokens, each.reward) for each in found]
        first, last = (times.first if times else 0, 1 << 62) if live else (ended.first, ended.last)  # type: ignore[union-attr]
        stays, events = tell(read_events(self.directory, [name, group], first, last), name)
        samples, _ = self.texts.search(name=name, limit=1)
        common = stays, events, sorted(members, key=lambda each: _natural(each[0])), samples[0] if samples else None
        if ended is not None:
            return answers.Life(
                name,
                group,
                ended.state,
                ended.step,
                ended.reason,
                ended.reward,
                ended.tokens,
                ended.admitted,
                ended.generated,
                ended.scored,
                ended.ended,
                *common,
            )
        assert live is not None
        at = (times.admitted, times.generated, times.scored) if times else (0.0, None, None)
        return answers.Life(name, group, live.state, None, "", live.reward, live.generated, *at, None, *common)


def _cell(group: Group, leased: bool) -> answers.GroupCell:
    states = {member.state for member in group.members}
    if leased:
        state = "trained"
    elif group.complete:
        state = "complete"
    elif states & {"running", "interrupted"}:
        state = "decoding"
    else:
        state = "waiting" if "queued" in states else "played" if "waiting" in states else "scoring"
    tokens = sum(member.generated for member in group.members)
    version = -1 if group.version is None else group.version
    return answers.GroupCell(group.name, state, version, group.scored, group.needed, tokens)


def _member(each: Trajectory) -> tuple[str, str, int, float | None]:
    return each.name, each.state, each.generated, each.reward


def _natural(name: str) -> tuple[int, str]:
    """i2 before i10."""
    return len(name), name
