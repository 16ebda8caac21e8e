"""The actor of one role: it runs the role's process on its node, and says how that ended.

A role is a process of its own below the actor, the same as in a run on one machine, and speaks to the control plane
over its own link. So the actor answers while the role computes, exit status and log are those of the role alone, an
engine has its main thread and its signals, and Ray has nothing to serialise. The process dies with its actor. An actor
that nobody has asked for a process for a while ends, and gives its place back. ::

    host = ray.remote(Host).options(lifetime="detached", max_restarts=0, ...).remote(run, token)
    about = await host.start.remote(door, setup)
    code = await host.wait.remote()
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from staleflow import tcp
from staleflow.run.directory import RunDirectory
from staleflow.runtime.local.child import PARENT
from staleflow.runtime.local.link import AWAY_S
from staleflow.runtime.local.process import spawn
from staleflow.servers.weights import WeightsError, claim, standby_of
from staleflow.types import Setup

DOOR = "control.json"
"""In the run directory: where the control plane listens."""
WEIGHTS = "weights.json"
"""And where the trainer's weights are."""
NODE = "STALEFLOW_NODE"
"""The address of its node, in the environment of a process: for people."""
IDLE_S = AWAY_S + 30.0


class About(NamedTuple):
    name: str
    incarnation: int
    pid: int
    """0: none is running."""
    node: str
    host: str


class Host:
    def __init__(self, run: str, token: str) -> None:
        ray: Any = importlib.import_module("ray")
        self._node, self._host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        door = tcp.read(Path(run) / DOOR)
        if door is None or door.token != token:
            raise ValueError(
                f"node {self._host} does not see the run directory {run}: put runs on a disk that all nodes share"
            )
        self._setup: Setup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Event | None = None
        self._serving: threading.Thread | None = None
        self._closing = threading.Event()
        self._idle = leave_later()

    async def start(self, door: str, packed: bytes) -> About:
        """Start the process that ``packed`` describes; one that is there is killed."""
        await self.kill()
        self._idle.cancel()
        setup = self._setup = msgspec.msgpack.decode(packed, type=Setup)
        log = RunDirectory(Path(setup.run)).log(setup.name)
        if setup.role == "trainer":
            self._serve_weights(setup)
        process = self._process = spawn(Path(door), setup, log, **{PARENT: str(os.getpid()), NODE: self._host})
        ended = self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def watch() -> None:
            process.wait()
            if process is self._process:
                self._idle = leave_later()
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=watch, daemon=True).start()
        return await self.about()

    def _serve_weights(self, setup: Setup) -> None:
        """From here on, until ``close``: a trainer may die meanwhile, and another take its place."""

        def serve() -> None:
            from staleflow.servers.weights.serving import WeightService  # loads PyTorch

            with WeightService(self._host, setup.store, Path(setup.source)), ExitStack() as claims:
                with suppress(WeightsError):  # an actor before this one has it, and will not have it for long
                    claims.enter_context(claim(setup.store, standby_of(setup.store), keep=setup.standby))
                self._closing.wait()

        if self._serving is None:
            self._serving = threading.Thread(target=serve, daemon=True)
            self._serving.start()

    async def close(self) -> None:
        """Leave nothing on the node."""
        self._closing.set()
        if self._serving is not None:
            await asyncio.to_thread(self._serving.join)

    async def about(self) -> About:
        process, setup = self._process, self._setup
        pid = process.pid if process is not None and process.poll() is None else 0
        name, incarnation = (setup.name, setup.incarnation) if setup is not None else ("", 0)
        return About(name, incarnation, pid, self._node, self._host)

    async def wait(self) -> int | None:
        """Until the process has ended: its exit status."""
        process, ended = self._process, self._ended
        if process is None or ended is None:
            return None
        await ended.wait()
        return process.returncode

    async def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self.wait()


def leave_later() -> threading.Timer:
    timer = threading.Timer(IDLE_S, leave)
    timer.daemon = True
    timer.start()
    return timer


def leave() -> None:
    """End this actor, and give back what it had reserved."""
    groups: Any = importlib.import_module("ray.util.placement_group")
    if (group := groups.get_current_placement_group()) is not None:
        groups.remove_placement_group(group)
    os._exit(0)
