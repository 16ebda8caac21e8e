"""The control plane's ports over sockets: a rollout instance and the trainer in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from staleflow.runtime.local.crew import Crew
from staleflow.runtime.local.process import Child
from staleflow.runtime.ports import Fence, Report, Snapshot, Work
from staleflow.servers.lifecycle import Group
from staleflow.servers.payloads import Chunk, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import (
    Abort,
    Feed,
    Finish,
    Interrupt,
    Job,
    Load,
    News,
    Pull,
    Reset,
    Save,
    Submit,
    TrainGroup,
    TrainRow,
)

UNHEARD = Load((0, 0, 0), -1, 0, 0, 0, 0, 0, 0, None, 0, 0.0)


class RemoteInstance:
    """``InstancePort`` of one life of an instance."""

    def __init__(self, child: Child, life: int, payloads: Payloads) -> None:
        self.name = child.name
        self.life = life
        self.load = UNHEARD
        """What it said last."""
        self._child = child
        self._payloads = payloads
        self._heard_at = _now()

    def hear(self, news: News) -> Report:
        self.load = news.load
        self._heard_at = _now()
        told = (*news.progress, *news.finished, *news.returned)
        return Report(
            self.name,
            self.life,
            finished=tuple((each.trajectory, each.epoch, each.spans) for each in news.finished),
            returned=tuple((each.trajectory, each.epoch, each.spans) for each in news.returned),
            progress=tuple((each.trajectory, each.epoch, each.spans) for each in news.progress),
            failed=tuple(news.failed),
            pulled=news.pulled,
            chunks={each.trajectory: Chunk(each.start, each.tokens, each.logprobs) for each in told},
        )

    def submit(self, fence: Fence, work: Sequence[Work]) -> None:
        jobs = [self._job(each) for each in work if each.trajectory in self._payloads]  # else it was given up meanwhile
        self._child.send(Submit(fence, jobs))

    def interrupt(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._child.send(Interrupt(fence, list(names)))

    def abort(self, fence: Fence, names: Sequence[tuple[str, int]]) -> None:
        self._child.send(Abort(fence, list(names)))

    def pull(self, fence: Fence, version: int) -> None:
        self._child.send(Pull(fence, version))

    def snapshot(self) -> Snapshot:
        load = self.load
        return Snapshot(
            self._heard_at,
            self.life,
            Fence(*load.applied),
            load.version,
            load.running,
            load.waiting,
            load.context,
            load.kv_free,
            load.kv_total,
            load.max_running,
            load.step,
        )

    def held(self) -> list[tuple[str, int]]:
        """A process never outlives the control plane that started it."""
        return []

    def _job(self, work: Work) -> Job:
        payloads = self._payloads
        return Job(
            work.trajectory,
            work.epoch,
            work.group,
            payloads.token_bytes(work.group),
            payloads.token_bytes(work.trajectory),
            payloads.logprob_bytes(work.trajectory),
            work.spans,
        )


class RemoteTrainer:
    """``TrainerPort`` of whichever process is the trainer."""

    def __init__(self, crew: Crew, server: TrajectoryServer, version: int) -> None:
        self.version = version
        """The newest that is safe in the parameter server."""
        self._crew = crew
        self._server = server

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        self._send(Feed(step, [self._group(group) for group in groups]))

    def finish(self, step: int) -> None:
        self._send(Finish(step))

    def reset(self) -> None:
        self._send(Reset())

    def save(self, folder: Path, also: dict[str, bytes]) -> None:
        self._send(Save(str(folder), also))

    def _send(self, message: msgspec.Struct) -> None:
        """To one that is not ready nothing is said: it takes a dead one's place, and what that one was told in part
        would be taken for the whole. Once it is ready it is reset, and told everything again."""
        child = self._crew.children["trainer"]
        if child.ready.is_set():
            child.send(message)

    def durable(self) -> int:
        return self.version

    def _group(self, group: Group) -> TrainGroup:
        rows = self._server.rows([group])
        return TrainGroup(
            rows[0].prompt.tobytes(),
            [
                TrainRow(
                    row.name,
                    row.tokens.tobytes(),
                    row.logprobs.tobytes(),
                    tuple((version, count) for version, count in row.spans),
                    row.reward,
                )
                for row in rows
            ],
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
