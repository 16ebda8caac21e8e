"""The control plane's ports over sockets: a rollout instance and the trainer in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from staleflow.runtime.local.crew import Crew
from staleflow.runtime.local.process import Child
from staleflow.runtime.ports import Heard
from staleflow.servers.lifecycle import Group
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.types import Command, Feed, Fence, Finish, InstanceState, Report, Reset, Row, Save
from staleflow.workers.rollout import STREAM_S


class RemoteInstance:
    """``InstancePort`` of one incarnation of an instance."""

    def __init__(self, child: Child, incarnation: int, every_s: float = STREAM_S) -> None:
        """``every_s``: how often it sends the tokens of unfinished trajectories."""
        self.name = child.name
        self._every_s = every_s
        self.tokens, self.busy_s = 0, 0.0
        """Generated, and seconds of steps."""
        self._unseen = 0
        """Tokens of those that it had not sent at its last report."""
        self.since = _now()
        self.joined = False
        """Whether it may get work."""
        self.child = child
        self.send: Callable[[Command], None] = child.send
        self._held: list[tuple[str, int]] = []
        self._heard = Heard(_now(), incarnation, Fence(0, incarnation, 0), InstanceState(version=-1))

    @property
    def state(self) -> InstanceState:
        return self._heard.state

    def hear(self, report: Report) -> None:
        self._heard = Heard(_now(), report.incarnation, report.applied, report.state)
        self.tokens += (made := report.costs.tokens)
        self.busy_s += report.costs.busy_s
        if report.held is not None:
            self._held = report.held
        news = [*report.finished, *report.returned, *report.progress]
        sent = sum([len(each.chunk.tokens) // 4 for each in news if each.chunk is not None])
        self._unseen = max(0, self._unseen + made - sent) if report.state.running else 0

    def unseen(self) -> int:
        """Tokens that it has made and not sent, about: they are lost if it is dead."""
        since_s = min(_now() - self._heard.time, self._every_s) if self.state.running else 0.0
        return self._unseen + round(since_s * self.tokens / self.busy_s if self.busy_s else 0.0)

    def heard(self) -> Heard:
        return self._heard

    def held(self) -> list[tuple[str, int]]:
        """When it was adopted; nothing if it was started by this control plane."""
        return self._held


class RemoteTrainer:
    """``TrainerPort`` of whichever process is the trainer."""

    def __init__(
        self,
        crew: Crew,
        server: TrajectoryServer,
        version: int = 0,
        asked: Callable[[str, str, float], None] = lambda _kind, _what, _size: None,
    ) -> None:
        """``asked`` is told what the trainer is to do: the kind, what for people, and how much."""
        self.version = version
        """The newest that is safe in the parameter server."""
        self.at = version
        """Where the present trainer is: before that, if what was safe went with the machine of the one before."""
        self.news = asyncio.Event()
        """Set when a trainer says where it is."""
        self._crew = crew
        self._server = server
        self._asked = asked
        self._child: Child | None = None
        self._sent = 0

    def made(self, version: int) -> None:
        """The version is safe. May be called late and again."""
        self.at, self.version = version, max(self.version, version)
        self.news.set()

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        rows = [self._server.rows([group]) for group in groups]
        tokens = sum([len(row.token_bytes) // 4 for group in rows for row in group])
        ledger = self._server.ledger
        self._send(Feed(step, rows, ledger.batch_size - ledger.taken), "feed", f"gradients of step {step}", tokens)

    def make_again(self, step: int, groups: list[list[Row]]) -> None:
        """A step that is committed already: the trainer began before it."""
        tokens = sum(row.tokens.size for group in groups for row in group)
        self._send(Feed(step, groups), "feed", f"gradients of step {step}", tokens)
        self._send(Finish(step, len(groups)), "finish", f"update of step {step}")

    def finish(self, step: int) -> None:
        self._send(Finish(step, len(self._server.leased)), "finish", f"update of step {step}")

    def reset(self) -> None:
        self._send(Reset())

    def save(self, folder: Path, also: dict[str, bytes]) -> None:
        self._send(Save(str(folder), also), "save", f"checkpoint {folder.name}")

    def has_done(self, handled: int) -> bool:
        """Whether that is all it was sent."""
        return handled >= self._sent

    def _send(self, message: msgspec.Struct, kind: str = "", what: str = "", size: float = 1.0) -> None:
        """A trainer that is not ready is sent nothing: it replaces a dead one, and would take the rest of what that one
        was sent for the whole. Once it is ready it is reset, and sent everything again."""
        child = self._crew.children["trainer"]
        if not child.ready.is_set():
            return
        if child is not self._child:
            self._child, self._sent = child, 0
        self._sent += 1
        if kind:
            self._asked(kind, what, size)
        child.send(message)

    def durable(self) -> int:
        return self.version


def _now() -> float:
    return asyncio.get_running_loop().time()
