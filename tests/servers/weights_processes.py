"""Processes that push and pull weights until they are killed, for tests that kill them."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from staleflow.servers.weights import WeightsError
from staleflow.servers.weights.parameter_server import LocalParameterServer
from tests.forked import context

NAME = "killed"
ELEMENTS = {"embed": 300_000, "norm": 17, "up": 200_000, "down": 100_000, "bias": 1, "head": 80_000}
"""About 2.7 MB: a push takes most of a millisecond."""


def filled(version: int) -> dict[str, torch.Tensor]:
    """Every element tells the version and the tensor."""
    return {name: torch.full((size,), 10.0 * version + at) for at, (name, size) in enumerate(ELEMENTS.items())}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(size) for name, size in ELEMENTS.items()}


def torn(version: int, tensors: dict[str, torch.Tensor]) -> str | None:
    """What is not of this version, in words."""
    for at, (name, tensor) in enumerate(tensors.items()):
        low, high = tensor.min().item(), tensor.max().item()
        if (low, high) != (10.0 * version + at,) * 2:
            return f"version {version}: {name} holds {low}..{high}, not {10.0 * version + at}"
    return None


class Child:
    """A process and the pipe it reports on."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self.pipe, theirs = context().Pipe()
        self.process = context().Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next report; fails instead of waiting forever."""
        assert self.pipe.poll(60), "the child says nothing"
        return self.pipe.recv()

    def kill(self) -> list[Any]:
        """SIGKILL. Returns what it had still reported."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        rest: list[Any] = []
        with contextlib.suppress(EOFError):
            while self.pipe.poll(0):
                rest.append(self.pipe.recv())
        self.pipe.close()
        return rest


def push_for_ever(pipe: Connection, registry: Path, fresh: bool) -> None:
    """Take over (or create) and push as fast as possible. Reports the first version it pushed."""
    torch.set_num_threads(1)
    server = (LocalParameterServer.create if fresh else LocalParameterServer.take_over)(NAME, registry=registry)
    first = server.newest() + 1
    tensors = filled(first)
    server.push(first, tensors)
    pipe.send(first)
    for version in range(first + 1, 10**9):
        for at, tensor in enumerate(tensors.values()):
            tensor.fill_(10.0 * version + at)  # quicker than the push, so that most kills fall into that
        server.push(version, tensors)


def pull_for_ever(pipe: Connection, registry: Path) -> None:
    """Pull and look at every element. Reports the first version, torn tensors, and on request how many pulls it did."""
    torch.set_num_threads(1)
    server = LocalParameterServer.attach(NAME, registry=registry)
    into, pulls, last = zeros(), 0, -1
    while not (pulls and pipe.poll(0)):
        try:
            version = server.pull(into, max(last, 0))
        except WeightsError as error:
            pipe.send(f"error: {error}")
            continue
        wrong = torn(version, into) or (f"went back from {last} to {version}" if version < last else None)
        if wrong:
            pipe.send(f"torn: {wrong}")
        last, pulls = version, pulls + 1
        if pulls == 1:
            pipe.send(version)
    server.close()
    pipe.send(("pulls", pulls))


def fork_and_wait(pipe: Connection, registry: Path) -> None:
    """Create, push, and fork a child that outlives this process until it gets the command to end."""
    server = LocalParameterServer.create(NAME, registry=registry)
    server.push(0, filled(0))
    child = os.fork()
    if child == 0:
        try:
            server.newest()
        except WeightsError as error:
            pipe.send(("child", str(error)))
        with contextlib.suppress(EOFError):
            pipe.recv()
        os._exit(0)
    signal.pause()
