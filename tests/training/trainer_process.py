"""The trainer's process of a local run, for tests that kill it: all of ``runtime/local/child.py`` but the interpreter's
start, because it is forked from a process that has imported everything once."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import signal
import socket
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import peft
import torch
import transformers.models.llama.modeling_llama

import staleflow.config
from staleflow.frames import framed
from staleflow.runtime.local import child
from staleflow.runtime.local.link import SocketLink
from staleflow.training import build, standby
from staleflow.types import FromProcess, Setup, ToProcess
from staleflow.workers import trainer as worker
from staleflow.workers.link import Gone
from tests.forked import START_S, context

__all__ = ["build", "peft", "staleflow", "standby", "transformers", "worker"]


def store_of(run: Path, attempt: int = 1) -> str:
    """The name of a run's weights among those of all runs on the machine."""
    return f"test-{blake2b(str(run).encode(), digest_size=8).hexdigest()}-{attempt}"


def main(end: socket.socket, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    child.serve(SocketLink(end, ToProcess))


class TrainerProcess:
    def __init__(self, run: Path, model: Path, standby: bool, checkpoint: str = "", attempt: int = 1) -> None:
        ours, theirs = socket.socketpair()
        self._log = run / "trainer.log"
        self._log.touch()
        self.process = context().Process(target=main, args=(theirs, self._log), daemon=True)
        self.process.start()
        theirs.close()
        self._socket = ours
        self._link = SocketLink(ours, FromProcess)
        self._heard: list[Any] = []
        cores = sorted(os.sched_getaffinity(0))
        folders = str(run), str(model), store_of(run, attempt)
        self.send([Setup("trainer", "trainer", 1, *folders, cores, 1, 0, checkpoint, standby)])

    def send(self, messages: Iterable[msgspec.Struct]) -> None:
        self._socket.sendall(b"".join(map(framed, messages)))

    def hear(self) -> Any:
        """The next message; fails instead of waiting forever, or after its death."""
        while not self._heard:
            try:
                messages = list(self._link.receive(START_S))
            except Gone:
                raise AssertionError(f"the trainer died: {self._log.read_text()}") from None
            assert messages, f"the trainer says nothing: {self._log.read_text()}"
            self._heard += messages
        return self._heard.pop(0)

    def hear_kind(self, kind: type) -> Any:
        while not isinstance(message := self.hear(), kind):
            pass
        return message

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self.process.join(60)
        self._socket.close()
