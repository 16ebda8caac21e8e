"""What the control plane's process costs at laptop size: CPU time for one short trajectory, from prompt to commit.

    python bench/control.py [--json] [--seconds 4] [--repeats 3] [--rate 400]

Everything that this process does in a run is the production code, set up as ``staleflow/runtime/local/run.py`` does:
control plane, trajectory server with payload, journal and decisions on disk, outbox, ports over sockets, and one reward
worker that scores the embedded task. Only the other end of the sockets is made up: one process that plays two instances
and the trainer. The instances are production rollout workers over an engine that answers every prompt with its right
response, at about ``--rate`` trajectories a second.

``all_us`` is CPU time of the process by trajectory, the median of the training steps of all repeats; ``best_us`` is the
step that other processes on the machine disturbed least. The parts are means, by the clock of the main thread:
``decide`` (admission, situation, decision), ``route`` (the routing in it), ``place`` (carrying the commands out),
``send`` (encoding and writing), ``receive`` (reading and decoding), ``report``, ``ask`` and ``score`` (rewards),
``feed`` (the trainer's rows), ``push`` (commits), ``select`` (waiting for events: the system calls), and ``loop``, what
is left: the event loop and the pipes of the reward worker. ``journal`` is the other thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from os import getloadavg
from pathlib import Path
from selectors import DefaultSelector
from threading import Thread
from typing import Any

from staleflow.config import Config
from staleflow.coordinator import routing
from staleflow.coordinator.cost import CostModel
from staleflow.coordinator.strategies import ROUTING
from staleflow.frames import Frames
from staleflow.protocol import StalenessLedger
from staleflow.reward.pool import PoolPort, RewardPool
from staleflow.rollout.engine import Part, Reason, Request, Result, Sampling, StepOutput
from staleflow.run.decisions import DecisionLog
from staleflow.run.opening import LAZY_S
from staleflow.runtime.control import ControlPlane, Settings
from staleflow.runtime.local.link import Channel, SocketLink
from staleflow.runtime.local.patience import run_patiently
from staleflow.runtime.local.remote import RemoteInstance, RemoteTrainer
from staleflow.runtime.outbox import HeldTrainer, Outbox
from staleflow.servers.durable import DurableJournal
from staleflow.servers.payloads import Limits, Payloads
from staleflow.servers.trajectories import TrajectoryServer
from staleflow.tasks.adder import FIRST_COUNTER, PROMPT_TOKENS, VOCABULARY, Adder, make
from staleflow.tasks.prompts import TaskPrompts
from staleflow.types import Finish, InstanceState, Pushed, Spans, ToProcess
from staleflow.workers.link import Gone
from staleflow.workers.rollout import TICK_S, Requests, RolloutWorker, serve

TARGET_US = 100.0
TARGET_SHARE = 0.04
WARM_UP_STEPS = 3
MEAN_TOKENS = 23.0
MAX_TOKENS = 128
STEP_S = 0.004
UPDATE_S = 0.02
"""How long the trainer takes from the last group to the new version."""
FOR_EVER = 10**9


# The other end


@dataclass(slots=True)
class Playing:
    """A request in progress: when it began, and how fast its tokens come."""

    request: Request
    response: list[int]
    began: float
    spans: Spans

    def made(self, now: float, token_s: float) -> int:
        return min(len(self.response), int((now - self.began) / token_s))

    def stamp(self, made: int, version: int) -> Spans:
        if (fresh := made - sum(count for _, count in self.spans)) > 0:
            last = self.spans[-1][1] if self.spans and self.spans[-1][0] == version else 0
            self.spans = (*(self.spans[:-1] if last else self.spans), (version, last + fresh))
        return self.spans


class Player:
    """An engine that knows the answers. Its steps cost nothing: it sleeps instead."""

    def __init__(self, token_s: float, config: Config) -> None:
        self.version = -1
        self._token_s = token_s
        self._rollout = config.rollout
        self._playing: dict[str, Playing] = {}
        self._returned: list[Result] = []

    @property
    def busy(self) -> bool:
        return bool(self._playing or self._returned)

    def submit(self, requests: Sequence[Request]) -> None:
        now = time.monotonic()
        for each in requests:
            began = now - len(each.tokens) * self._token_s
            self._playing[each.name] = Playing(each, respond(each.prompt), began, each.spans)

    def interrupt(self, names: Sequence[str]) -> None:
        self._returned += [self._result(name, "interrupted") for name in names if name in self._playing]

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._playing.pop(name, None)

    def step(self) -> StepOutput:
        time.sleep(STEP_S)
        now = time.monotonic()
        over = [name for name, each in self._playing.items() if each.made(now, self._token_s) == len(each.response)]
        returned, self._returned = self._returned, []
        return StepOutput([self._result(name, "stop") for name in over], returned, [], len(self._playing))

    def peek(self, name: str, start: int) -> Part | None:
        each = self._playing[name]
        made = each.made(time.monotonic(), self._token_s)
        if made <= start:
            return None
        return Part(each.stamp(made, self.version), each.response[start:made], [-0.5] * (made - start))

    def pull(self, source: Any, version: int) -> int:  # noqa: ARG002
        now = time.monotonic()
        for each in self._playing.values():
            each.stamp(each.made(now, self._token_s), self.version)
        self.version = version
        return version

    def weights(self) -> dict[str, Any]:
        return {}

    def snapshot(self) -> InstanceState:
        running, total = len(self._playing), self._rollout.kv_tokens
        context = 24 * running
        step = (running, context, 0.004) if running else None
        return InstanceState(
            self.version, running, 0, context, total - context, total, self._rollout.max_running, self.version, step
        )

    def close(self) -> None: ...

    def _result(self, name: str, reason: Reason) -> Result:
        each = self._playing.pop(name)
        made = each.made(time.monotonic(), self._token_s)
        spans = each.stamp(made, self.version)
        return Result(name, each.request.epoch, reason, each.response[:made], [-0.5] * made, spans, self.version)


def respond(prompt: Sequence[int]) -> list[int]:
    increment, counter, tens, ones = prompt
    x = 10 * (tens - 3) + ones - 3
    problem = make(x, increment - FIRST_COUNTER - 36, counter - FIRST_COUNTER)
    return list(Adder().solve(problem))


def play(handles: list[int], token_s: float) -> None:
    """The first socket is the trainer's, the others are instances'."""
    trainer, *instances = [SocketLink(socket.socket(fileno=handle), ToProcess) for handle in handles]
    requests = Requests(Sampling(max_tokens=MAX_TOKENS), seed=0)
    for at, link in enumerate(instances):
        worker = RolloutWorker(f"i{at}", Player(token_s, Config()), None, requests, incarnation=1)  # type: ignore[arg-type]
        Thread(target=serve, args=(worker, link), daemon=True).start()
    with suppress(Gone):
        while True:
            for message in trainer.receive(None):
                if isinstance(message, Finish):
                    time.sleep(UPDATE_S)
                    trainer.send(Pushed(message.step + 1))


# This end


class Peer:
    """What ``RemoteInstance`` needs of a ``Child``, and ``RemoteTrainer`` of a ``Crew`` with that child."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.channel: Channel | None = None
        self.children = {name: self}
        self.ready = asyncio.Event()
        self.ready.set()

    def send(self, message: Any) -> None:
        assert self.channel is not None
        self.channel.send(message)


async def opened(end: socket.socket, hear: Callable[[Any], None]) -> Channel:
    def channel() -> Channel:
        made = Channel(lambda _channel, _hello: None)
        made.on_message = hear
        return made

    return (await asyncio.get_running_loop().create_unix_connection(channel, sock=end))[1]


class Clock:
    """CPU seconds of the main thread by part; a part called by another counts only once, as itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inner = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[part], self.calls[part] = 0.0, 0

        def timed(*arguments: Any) -> Any:
            began, outer, self._inner = time.thread_time(), self._inner, 0.0
            try:
                return function(*arguments)
            finally:
                spent = time.thread_time() - began
                self.seconds[part] += spent - self._inner
                self.calls[part] += 1
                self._inner = outer + spent

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        watched: list[tuple[str, Any, str]] = [
            ("decide", ControlPlane, "_cycle"),
            ("route", routing, "waterfall"),
            ("place", ControlPlane, "_obey"),
            ("send", Channel, "send"),
            ("receive", Frames, "feed"),
            ("report", Channel, "data_received"),
            ("ask", PoolPort, "score"),
            ("score", ControlPlane, "on_scored"),
            ("feed", RemoteTrainer, "feed"),
            ("push", ControlPlane, "on_pushed"),
            ("select", DefaultSelector, "select"),
        ]
        originals = [(owner, name, getattr(owner, name)) for _, owner, name in watched]
        for part, owner, name in watched:
            setattr(owner, name, self.timed(part, getattr(owner, name)))
        ROUTING._loaded.clear()  # it keeps the functions of the repeat before
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


class Bench:
    def __init__(self, folder: Path, rate: float) -> None:
        config = self.config = Config()
        self.prompts = TaskPrompts(Adder(1000))
        self.journal = DurableJournal(folder / "journal.db", lazy_s=LAZY_S)
        self.decisions = DecisionLog(folder / "decisions.jsonl", on_trouble=print)
        ledger = StalenessLedger(config.groups, config.staleness)
        limits = Limits(MAX_TOKENS, PROMPT_TOKENS, len(VOCABULARY))
        self.server = TrajectoryServer(ledger, config.group_size, 0, self.journal, Payloads(limits))
        self.server.on_committed = self._committed
        self.outbox = Outbox(self.journal)
        places = config.rollout.instances * config.rollout.max_running
        self.token_s = (places / rate - 0.05) / MEAN_TOKENS  # a place is empty for about 50 ms between two
        self.trained = 0
        self.marks: list[tuple[int, float, float, float]] = []
        self.clock = Clock()

    async def run(self, seconds: float) -> tuple[dict[str, float], list[float]]:
        self.journal.on_durable = self.outbox.waker(asyncio.get_running_loop())
        config = self.config
        peer = Peer("trainer")
        trainer = RemoteTrainer(peer, self.server, 0)  # type: ignore[arg-type]
        pool = RewardPool(config.reward, self._scored, self._failed, None, "adder", heard_s=TICK_S)
        cost = CostModel(0.003, 0.003, 3e-5, 0.0, 1e-8, 1e-5)
        settings = Settings(config.strategies, cost, cycle_s=0.0, pull_s=0.1)
        self.control = ControlPlane(
            settings, self.server, HeldTrainer(trainer, self.outbox), self._rewards(pool), self.prompts
        )

        self.control.on_decision = self.decisions.write

        def from_trainer(message: Any) -> None:
            if isinstance(message, Pushed):
                trainer.version = message.version
                self.control.on_pushed(message.version)

        pairs = [socket.socketpair() for _ in range(1 + config.rollout.instances)]
        handles = [theirs.fileno() for _, theirs in pairs]
        player = subprocess.Popen(
            [sys.executable, __file__, "--play", json.dumps(handles), "--token-s", str(self.token_s)], pass_fds=handles
        )
        for _, theirs in pairs:
            theirs.close()
        try:
            await pool.start()
            peer.channel = await opened(pairs[0][0], from_trainer)
            peer.channel.hurry()
            for at, (ours, _) in enumerate(pairs[1:]):
                await self._instance(f"i{at}", ours)
            await self._measured(seconds)
        finally:
            await pool.close()
            player.kill()
            player.wait()
            self.outbox.close()
            self.journal.on_durable = lambda: None
            await asyncio.to_thread(self.journal.close)
        return self._result()

    def _rewards(self, pool: RewardPool) -> PoolPort:
        payloads = self.server.payloads
        assert payloads is not None
        return PoolPort(pool, self.prompts.problem, payloads.bytes_of)

    async def _instance(self, name: str, end: socket.socket) -> None:
        peer = Peer(name)
        port = RemoteInstance(peer, 1)  # type: ignore[arg-type]
        joined = False

        def hear(message: Any) -> None:
            nonlocal joined
            port.hear(message)
            if joined:
                self.control.on_report(message)
            else:
                joined = True
                self.control.join(port)

        peer.channel = await opened(end, hear)

    def _scored(self, name: str, reward: float, _parts: tuple[float, ...]) -> None:
        assert reward == 1.0
        self.control.on_scored(name, reward)

    def _failed(self, name: str, why: str) -> None:
        raise RuntimeError(f"{name}: {why}")

    def _committed(self, step: int, groups: list[Any]) -> None:
        self.trained += sum(len(group.members) for group in groups)
        for group in groups:
            group.members = []
        if step + 1 == WARM_UP_STEPS:
            self.clock.seconds = dict.fromkeys(self.clock.seconds, 0.0)
            self.clock.calls = dict.fromkeys(self.clock.calls, 0)
        if step + 1 >= WARM_UP_STEPS:
            self.marks.append((self.trained, time.monotonic(), time.thread_time(), time.process_time()))

    async def _measured(self, seconds: float) -> None:
        with self.clock.watching():
            running = asyncio.create_task(self.control.run(FOR_EVER))
            while not self.marks or self.marks[-1][1] - self.marks[0][1] < seconds:
                await asyncio.sleep(0.25)
                if running.done():
                    running.result()
            self.control.stop()
            running.cancel()

    def _result(self) -> tuple[dict[str, float], list[float]]:
        (n0, wall0, main0, all0), (n1, wall1, main1, all1) = self.marks[0], self.marks[-1]
        count, wall = n1 - n0, wall1 - wall0
        parts = {part: 1e6 * spent / count for part, spent in self.clock.seconds.items()}
        steps = [1e6 * (after[3] - before[3]) / (after[0] - before[0]) for before, after in pairwise(self.marks)]
        return {
            "trajectories_per_s": count / wall,
            "share_of_core": (all1 - all0) / wall,
            **{f"{part}_us": spent for part, spent in parts.items()},
            "loop_us": 1e6 * (main1 - main0) / count - sum(parts.values()),
            "journal_us": 1e6 * (all1 - all0 - main1 + main0) / count,
            "decisions_per_s": self.clock.calls["decide"] / wall,
            "reports_per_s": self.clock.calls["report"] / wall,
            "wakes_per_s": self.clock.calls["select"] / wall,
        }, steps


def measure(seconds: float, repeats: int, rate: float) -> dict[str, float]:
    results: list[dict[str, float]] = []
    steps: list[float] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:  # a disk; /tmp may be memory
            result, by_step = run_patiently(Bench(Path(folder), rate).run(seconds))
        results.append(result)
        steps += by_step
    costs = {"all_us": statistics.median(steps), "best_us": min(steps), "target_us": TARGET_US}
    median = {name: statistics.median(each[name] for each in results) for name in results[0]}
    return costs | {"target_share": TARGET_SHARE, "load": getloadavg()[0]} | median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each repeat")
    parser.add_argument("--repeats", type=int, default=3, help="the table has medians")
    parser.add_argument("--rate", type=float, default=400.0, help="trajectories a second, about")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--token-s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(json.loads(options.play), options.token_s)
        return
    result = measure(options.seconds, options.repeats, options.rate)
    print(
        json.dumps(result, indent=1)
        if options.json
        else "\n".join(f"{name:20} {value:10.3f}" for name, value in result.items())
    )


if __name__ == "__main__":
    main()
