"""What instances report, as news for the trajectory server: tokens so far, and what ended, came back or failed.

A report that cannot be true changes nothing: the trajectory continues elsewhere from what was known before, and after
``MOST_FAULTS`` of them its group is given up. ::

    reports = Reports(server, scoring, gauge, release)
    reports.take(member, report)
"""

from collections.abc import Callable

from msgspec.structs import replace

from staleflow.runtime.fleet import Member
from staleflow.runtime.scoring import Scoring
from staleflow.runtime.situate import Gauge
from staleflow.servers.lifecycle import Group
from staleflow.servers.payloads import BadReportError
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Chunk, Report, Spans, TrajectoryNews

MOST_FAULTS = 3
"""Reports about one trajectory that cannot be true before its group is given up."""


class Reports:
    def __init__(
        self, server: TrajectoryServer, scoring: Scoring, gauge: Gauge, release: Callable[[Group, str], None]
    ) -> None:
        self.truncating: set[str] = set()
        """Trajectories that are to end where they are, once their instance has returned them."""
        self.on_bad: Callable[[str, str, str], None] = lambda _instance, _kind, _why: None
        """Called for reports that cannot be true and for trajectories that an engine failed at: the instance, which of
        the two, and what is wrong in one line."""
        self.turned: Callable[[Member, TrajectoryNews], None] | None = None
        """Where environments play: what is done about a trajectory that ended, which is a turn then."""
        self._server = server
        self._scoring = scoring
        self._gauge = gauge
        self._release = release

    def take(self, member: Member, report: Report) -> None:
        for tell, reported in (
            (self._server.stream, report.progress),
            (self._generated, report.finished),
            (self._returned, report.returned),
        ):
            for news in reported:
                name, epoch = news.trajectory, news.epoch
                try:
                    if self.turned is not None and reported is report.finished:
                        self.turned(member, news)
                    elif self.turned is not None and reported is report.returned and name in self.truncating:
                        self.truncating.discard(name)
                        self.turned(member, replace(news, reason="length"))
                    else:
                        tell(name, epoch, news.spans, news.chunk)
                except BadReportError as error:
                    member.forget([(name, epoch)])
                    self._fault(member, name, epoch, str(error), "bad reports")
                if reported is not report.progress:
                    member.left(name, epoch)
        for name, epoch, why in report.failed:
            self._fault(member, name, epoch, why, "no engine could serve it")

    def _fault(self, member: Member, name: str, epoch: int, why: str, reason: str) -> None:
        """It is not to continue there. Elsewhere it may, a few times."""
        self.on_bad(member.name, reason, why)
        self.truncating.discard(name)
        member.left(name, epoch)
        trajectory = self._server.fault(name, epoch, why)
        if trajectory is not None and trajectory.faults >= MOST_FAULTS:
            self._release(trajectory.group, reason)

    def _generated(self, name: str, epoch: int, spans: Spans, chunk: Chunk | None) -> None:
        if self._server.generated(name, epoch, spans, chunk):
            trajectory = self._server.trajectories[name]
            self._gauge.finished(trajectory.generated, trajectory.group.version or 0)
            self._scoring.ask(trajectory)
            self.truncating.discard(name)

    def _returned(self, name: str, epoch: int, spans: Spans, chunk: Chunk | None) -> None:
        server = self._server
        trajectory = server.trajectories.get(name)
        if trajectory is None or trajectory.epoch != epoch or name not in self.truncating:
            server.give_back(name, epoch, spans, chunk)
            return
        self.truncating.discard(name)
        if spans and server.generated(name, epoch, spans, chunk):
            self._scoring.ask(trajectory)
        else:
            server.give_back(name, epoch, spans)
