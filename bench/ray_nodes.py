"""Ray nodes on loopback addresses of this machine, each of which can lose its power.

with Nodes(folder) as nodes:
    second = nodes.add()
    run(environment=nodes.environment)      # RAY_ADDRESS, and the token
    nodes.kill(second)
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench.chaos_lab import die_with_parent

START_S = 90.0
TRIES = 3
"""To start a node: on crowded cores Ray gives up waiting for its own processes."""


STARTED = "Ray runtime started"


class Node:
    def __init__(self, process: subprocess.Popen[bytes], host: str) -> None:
        self.process = process
        self.host = host


class Nodes:
    """The first one has the cluster's own service: it is not to be killed."""

    def __init__(self, head_cpus: int = 0, dashboard: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sfr-", dir="/tmp"))  # sockets are in it: a short name
        self._log = (self._folder / "nodes.log").open("ab")
        self._count = 1
        self._network = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}"  # not that of another cluster here
        first = f"{self._network}.2"
        port = _free_port(first)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = token | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"{first}:{port}"}
        self.dashboard = f"http://{first}:{(board := _free_port(first))}"
        where = (f"--port={port}", f"--dashboard-host={first}", f"--dashboard-port={board}")
        self._nodes: list[Node] = []
        self.first = self._start(head_cpus, "--head", *where, f"--include-dashboard={str(dashboard).lower()}")

    def add(self, cpus: int = 8) -> Node:
        return self._start(cpus, f"--address={self.environment['RAY_ADDRESS']}")

    def kill(self, node: Node) -> None:
        """Everything on it, at once; nothing if that has been done."""
        if node not in self._nodes:
            return
        for _ in range(2):
            for pid in [*below(node.process.pid), node.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        node.process.wait()
        self._nodes.remove(node)

    def close(self) -> None:
        for node in reversed(list(self._nodes)):
            self.kill(node)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, cpus: int, *words: str) -> Node:
        for _ in range(TRIES - 1):
            with suppress(RuntimeError):
                return self._try(cpus, *words)
        return self._try(cpus, *words)

    def _try(self, cpus: int, *words: str) -> Node:
        log = self._folder / "nodes.log"
        started = log.read_text(errors="replace").count(STARTED)
        self._count += 1
        host = f"{self._network}.{2 if '--head' in words else self._count}"
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--block",
                f"--node-ip-address={host}",
                f"--num-cpus={cpus}",
                f"--dashboard-agent-listen-port={_free_port('127.0.0.1')}",  # another cluster may have the usual one
                "--object-store-memory=80000000",
                *((f"--temp-dir={self._folder}",) if "--head" in words else ()),
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._nodes.append(node := Node(process, host))
        until = time.monotonic() + START_S
        while log.read_text(errors="replace").count(STARTED) == started:
            if process.poll() is not None or time.monotonic() > until:
                self.kill(node)
                raise RuntimeError(f"a Ray node could not be started: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        return node


def node_of(pid: int) -> str:
    """The address of the node that a process of a run is on."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(each.partition("=")[2] for each in words if each.startswith("STALEFLOW_NODE="))


def below(pid: int) -> list[int]:
    """Children, their children, and so on, also those in sessions of their own."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, ahead = list[int](), [pid]
    while ahead:
        ahead = [child for each in ahead for child in parents.get(each, [])]
        found += ahead
    return found


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
