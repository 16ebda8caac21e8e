"""What the simulator leaves out of a control plane's work, for ``bench/scaling.py``: memory, messages, the disk."""

from __future__ import annotations

import asyncio
import gc
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from staleflow.protocol import StalenessLedger
from staleflow.run.opening import LAZY_S
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.fleet import Member
from staleflow.runtime.ports import Heard
from staleflow.servers.durable import DurableJournal
from staleflow.servers.journal import MemoryJournal
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.simulate.setting import preset
from staleflow.types import Chunk, Fence, InstanceState, Report, Submit, TrajectoryNews

IN_FLIGHT = 100
"""Trajectories for each instance."""
GROUP, PROMPT, TOKENS = 16, 512, 1_536
"""Members of a group; tokens of a prompt, and about those of a response, in the preset ``paper-14b``."""
STREAMED = 64
"""Tokens in a report of unfinished ones: two seconds, with a hundred sequences on an instance."""
KV = 289_000
EMPTY = InstanceState(0, 0, 0, 0, KV, KV, 256, 0, None)
FENCE = Fence(1, 0, 7)
STATE = InstanceState(0, 90, 0, 90_000, 9_000, 99_000, 256, 0, (90, 90_000, 0.03))


class Prompts:
    def tokens(self, prompt: int) -> int | None:  # noqa: ARG002  # all alike
        return PROMPT

    def ids(self, prompt: int) -> bytes:  # noqa: ARG002
        return bytes(4 * PROMPT)


class Port:
    """An instance that takes what it is sent and makes nothing of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._heard = Heard(0.0, 0, Fence(1, 0, 0), EMPTY)

    def send(self, command: Any) -> None:
        state = self._heard.state
        if isinstance(command, Submit) and command.work:
            running, tokens = state.running + len(command.work), PROMPT * len(command.work)
            state = InstanceState(0, running, 0, state.context + tokens, state.kv_free - tokens, KV, 256, 0, None)
        self._heard = Heard(0.0, 0, command.fence, state)

    def heard(self) -> Heard:
        return self._heard

    def held(self) -> list[tuple[str, int]]:
        return []


class Nobody:
    """A trainer and reward workers that are never asked."""

    def durable(self) -> int:
        return 1


def filling(instances: int, decisions: int = 60) -> dict[str, float]:
    """An empty fleet, a version behind, is filled: every instance pulls, and trajectories are placed. Milliseconds of
    the first decision, in which all of them pull, and of the others."""
    setting = preset("paper-14b")
    groups = instances * IN_FLIGHT // (GROUP * (setting.staleness + 1))
    ledger = StalenessLedger.from_state(StalenessLedger(groups, setting.staleness).to_state() | {"version": 1})
    server = TrajectoryServer(ledger, GROUP, 0, MemoryJournal(keep=False))
    times: list[float] = []

    async def fill() -> None:
        nobody: Any = Nobody()
        control = ControlPlane(Settings(setting.strategies, setting.rollout), server, nobody, nobody, Prompts())
        for at in range(instances):
            control.join(Port(f"i{at}"))
        gc.disable()
        for _ in range(decisions):
            began, before = time.thread_time(), control.watch.routed
            control._cycle()  # a bench, not code that others call
            if control.watch.routed > before:
                times.append(1e3 * (time.thread_time() - began))
        gc.enable()

    asyncio.run(fill())
    others = sorted(times[1:])
    middle, last = others[len(others) // 2], others[-1]
    return {"instances": instances, "decisions": len(times), "first_ms": times[0], "p50_ms": middle, "max_ms": last}


def live(trajectories: int) -> dict[str, float]:
    """Trajectories on instances: resident memory of the process for each, and full garbage collections."""
    gc.collect()
    gc.freeze()
    before = resident()
    server = TrajectoryServer(StalenessLedger(trajectories // GROUP, 0), GROUP, 0, MemoryJournal(keep=False))
    members: list[Member] = []
    while len(server.trajectories) < trajectories:
        if len(members) * IN_FLIGHT <= len(server.trajectories):
            port = Port(f"i{len(members)}")
            members.append(Member.of(port, 1, port.heard(), 0))
        group = server.admit(Prompts())
        assert group is not None
        placed = [server.place(each.name, members[-1].name, 0) for each in group.members]
        members[-1].submit([each for each in placed if each is not None], [])
        for each in group.members:
            server.stream(each.name, 1, ((0, 700),))
    taken = resident() - before
    full = min(collected() for _ in range(3))
    gc.freeze()
    return {
        "trajectories": len(server.trajectories),
        "bytes_per_trajectory": taken / len(server.trajectories),
        "collection_ms": full,
        "collection_ms_frozen": collected(),
    }


def collected() -> float:
    began = time.thread_time()
    gc.collect()
    return 1e3 * (time.thread_time() - began)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Life:
    """Groups from admission to commit, a phase at a time. ``real``: with payload, the journal on disk and messages as
    on a socket; otherwise as under simulation."""

    def __init__(self, folder: Path, groups: int, real: bool) -> None:
        self.journal = DurableJournal(folder / "journal.db", lazy_s=LAZY_S) if real else None
        payloads = Payloads(Limits(TOKENS, PROMPT, 1_000)) if real else None
        journal = self.journal or MemoryJournal(keep=False)
        self.server = TrajectoryServer(StalenessLedger(groups, 0), GROUP, 0, journal, payloads)
        self.groups, self.real, self.spent = groups, real, 0.0
        self.bytes = 0
        """Of messages."""

    def begin(self) -> None:
        server = self.server
        for _ in range(self.groups):
            group = server.admit(Prompts())
            assert group is not None
            placed = [server.place(member.name, "i1234", 0) for member in group.members]
            submit = Submit(FENCE, [server.work(each) for each in placed if each is not None])
            if self.real:
                self.bytes += len(msgspec.msgpack.encode(submit))

    def stream(self, start: int) -> None:
        for report in self.reports(start, ended=False):
            for news in report.progress:
                self.server.stream(news.trajectory, news.epoch, news.spans, news.chunk)

    def end(self) -> None:
        for report in self.reports(TOKENS - STREAMED, ended=True):
            for news in report.finished:
                self.server.generated(news.trajectory, news.epoch, news.spans, news.chunk)
                self.server.score(news.trajectory, 1.0)
        self.server.consume()
        self.server.commit(0)

    def reports(self, start: int, ended: bool) -> list[Report]:
        """What instances say of all trajectories. Only what the control plane does with it is on the clock."""
        off = time.process_time()
        end = start + STREAMED
        chunk = Chunk.of(start, [7] * STREAMED, [-0.5] * STREAMED) if self.real else None
        reports: list[Any] = []
        for group in self.server.groups.values():
            news = [TrajectoryNews(each.name, 1, ((0, end),), chunk) for each in group.members]
            report = Report("i1234", 0, FENCE, STATE, news if ended else [], [], [] if ended else news)
            reports.append(msgspec.msgpack.encode(report) if self.real else report)
        self.spent -= time.process_time() - off
        if not self.real:
            return reports
        self.bytes += sum(map(len, reports))
        decode = msgspec.msgpack.Decoder(Report).decode
        return [decode(each) for each in reports]

    def timed(self, *phase: Any) -> float:
        """CPU microseconds of all threads for each trajectory, until the journal has it."""
        self.spent, began = 0.0, time.process_time()
        call, *arguments = phase
        call(*arguments)
        if self.journal is not None:
            self.journal.commit()
        return 1e6 * (self.spent + time.process_time() - began) / (self.groups * GROUP)


def real(groups: int) -> dict[str, float]:
    """What a real run adds to a trajectory, and what one report of its tokens so far costs."""
    found: dict[bool, tuple[float, float]] = {}
    sizes: dict[str, float] = {}
    for kind in (False, True):
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:  # a disk; /tmp may be memory
            life, starts = Life(Path(folder), groups, kind), range(0, TOKENS - STREAMED, STREAMED)
            begun = life.timed(life.begin)
            sizes["trajectory"], life.bytes = life.bytes / groups / GROUP, 0
            streams = [life.timed(life.stream, start) for start in starts]
            sizes["stream"], life.bytes = life.bytes / groups / GROUP / len(starts), 0
            found[kind] = begun + life.timed(life.end), sum(streams) / len(streams)
            sizes["trajectory"] += life.bytes / groups / GROUP
            if life.journal is not None:
                life.journal.close()
                sizes["log"] = (Path(folder) / "journal.db").stat().st_size / groups / GROUP
    return {
        "trajectory_us": found[True][0] - found[False][0],
        "stream_us": found[True][1],
        "stream_us_simulated": found[False][1],
        "trajectory_bytes": sizes["trajectory"],
        "stream_bytes": sizes["stream"],
        "log_bytes": sizes["log"],
    }
