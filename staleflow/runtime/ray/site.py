"""Where the processes of a run are: on the nodes of a Ray cluster, one that is joined or one of this machine alone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow import tcp
from staleflow.config import Config
from staleflow.errors import RunError, line_of
from staleflow.run.directory import RunDirectory
from staleflow.run.processes import Process
from staleflow.runtime.local.link import Channel
from staleflow.runtime.local.placement import Place
from staleflow.runtime.local.process import Child
from staleflow.runtime.local.site import LocalSite
from staleflow.runtime.ray import head
from staleflow.runtime.ray.host import DOOR, WEIGHTS
from staleflow.types import Hello, Role, Setup

if TYPE_CHECKING:
    from staleflow.runtime.ray.placing import Places


class RaySite(LocalSite):
    """Ray is loaded when it is opened: its settings are in the environment by then."""

    _places: Places
    _own: tcp.Address | None = None
    """The cluster of this machine, if none is joined."""
    _token = ""

    def __init__(self, directory: RunDirectory, config: Config) -> None:
        super().__init__(directory, config)
        self._said = ExitStack()

    @property
    def door(self) -> Path:
        return self.directory.path / DOOR

    def open(self) -> None:
        joins, run = self.config.ray.joins, self.directory.path
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not joins:
            self._own = head.found(run) or head.start(run)
            os.environ.update(head.environment(self._own.token))
            joins = f"{self._own.host}:{self._own.port}"
        from staleflow.runtime.ray.placing import Places, ray

        # A thread of Ray prints what nodes say, which is not for those who read this command's output.
        log = self._said.enter_context((self.directory.logs / "ray.log").open("a"))
        self._said.enter_context(redirect_stdout(log))
        try:
            ray.init(
                address=joins,
                namespace=f"staleflow {self.directory.store}",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # of many kinds
            raise RunError(
                f"the Ray cluster at {joins} cannot be joined ({line_of(error)}): start it with ray start --head, give "
                "another ray.address, or leave it out and unset RAY_ADDRESS"
            ) from None
        before = tcp.read(self.door)
        self._token = before.token if before is not None else tcp.token()
        self._places = Places(str(run), self._token, self._need)

    def left(self) -> list[Process]:
        return [
            Process(place.role_name, place.about.incarnation, place.about.pid, 0, self.directory.path)
            for place in self._places.left()
            if place.about.pid
        ]

    def end(self, left: Iterable[Process]) -> None:
        for each in left:
            self._places.give(self._places.of(each.name))

    def claims(self) -> AbstractContextManager[None]:
        return nullcontext()  # each node has its own

    def discard(self) -> None:
        """Each node does."""

    async def listen(self, on_hello: Callable[[Channel, Hello], None]) -> asyncio.Server:
        from staleflow.runtime.ray.placing import ray

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Channel(on_hello, self._token), ray.util.get_node_ip_address(), 0)
        host, port = server.sockets[0].getsockname()[:2]
        tcp.write(self.door, tcp.Address(host, port, self._token))
        return server

    def child(self, setup: Setup, term: int) -> Child:
        from staleflow.runtime.ray.child import HostedChild

        need = " and ".join(f"{size:g} {kind}" for kind, size in self._need(setup.role).items())
        return HostedChild(setup, self.directory.log(setup.name), term, self._places, need, self._own is not None)

    def places(self, instances: Sequence[str]) -> dict[str, Place]:
        if self._own is not None:
            return super().places(instances)
        threads = self.config.processes.threads or max(1, int(self.config.ray.cpus))
        return {name: Place((), threads) for name in ("trainer", "evaluator", *instances)}

    def refuses(self, config: Config, more: int) -> str | None:
        return super().refuses(config, more) if self._own is not None else None  # otherwise they wait for room

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._token:
            from staleflow.runtime.ray.placing import ray

            self._places.close()
            ray.shutdown()
        self._said.close()
        if self._own is not None:
            head.stop(self._own)
        for name in (DOOR, WEIGHTS):
            (self.directory.path / name).unlink(missing_ok=True)

    def _need(self, role: Role) -> dict[str, float]:
        if self._own is not None:
            return {head.ROOM: 1.0}
        options = self.config.ray
        ranks = self.config.training.ranks if role == "trainer" else 1
        need = {"CPU": options.cpus * ranks}
        device = self.config.training.device if role == "trainer" else self.config.rollout.device
        if device.startswith("cuda"):
            need["GPU"] = options.gpus * (
                ranks if role == "trainer" else _devices(self.config.rollout.engine_arguments)
            )
        return need


def _devices(arguments: dict[str, Any]) -> int:
    """GPUs of one engine."""
    return int(arguments.get("tensor_parallel_size", 1))
