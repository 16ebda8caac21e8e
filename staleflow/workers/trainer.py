"""The trainer as a process: groups come in, versions go out to the parameter server.

    worker = TrainerWorker(trainer, weights, send, tokenizer=folder)
    worker.publish()                     # the version to begin with, and what another trainer would go on from
    worker.handle([Feed(0, groups), Finish(0)])

A new version is pushed before anything else is done with the step: instances wait for weights, and nobody waits for
a checkpoint. Groups that gathered while the trainer was busy are packed into the same forward passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from staleflow.servers.weights import ParameterServer
from staleflow.training.checkpoints import save
from staleflow.training.standby import standby as what_is_left
from staleflow.training.trainer import StalenessError, StepReport, Trainer
from staleflow.types import (
    Broken,
    Feed,
    Finish,
    Pushed,
    Reset,
    Row,
    Save,
    Saved,
    Stop,
    Trained,
)
from staleflow.workers.link import Gone, Link


class TrainerWorker:
    def __init__(
        self,
        trainer: Trainer,
        weights: ParameterServer,
        send: Callable[[msgspec.Struct], None],
        tokenizer: Path | None = None,
        standby: bool = True,
    ) -> None:
        """``standby``: with each version goes what a trainer needs to take this one's place."""
        self.trainer = trainer
        self.idle_s = 0.0
        """Waiting for the groups of the present step."""
        self._busy_s = 0.0
        self._weights = weights
        self._send = send
        self._tokenizer = tokenizer
        self._standby = standby

    def publish(self) -> None:
        """Make the present version available, if it is not yet: a trainer before this one may have done so."""
        if self._weights.newest() < self.trainer.version:
            self._push()

    def handle(self, messages: Iterable[Any]) -> bool:
        """Do what they say, in order. False once one of them says to stop."""
        groups: list[list[Row]] = []
        step = -1
        for message in messages:
            if isinstance(message, Feed):
                step = message.step
                groups += message.groups
                continue
            self._feed(step, groups)
            groups = []
            match message:
                case Finish(step=finished):
                    self._finish(finished)
                case Reset():
                    self.trainer.reset()
                    self._busy_s = self.idle_s = 0.0
                case Save(folder=folder, also=also):
                    self._save(Path(folder), also)
                case Stop():
                    return False
        self._feed(step, groups)
        return True

    def _feed(self, step: int, groups: list[list[Row]]) -> None:
        if groups:
            began = time.perf_counter()
            self.trainer.feed(step, groups)
            self._busy_s += time.perf_counter() - began

    def _finish(self, step: int) -> None:
        began = time.perf_counter()
        report = self.trainer.finish(step)
        self._push()
        self._busy_s += time.perf_counter() - began
        self._send(
            Trained(
                step,
                facts(report),
                dict(report.token_staleness),
                dict(report.trajectory_staleness),
                self._busy_s,
                self.idle_s,
            )
        )
        self._send(Pushed(self.trainer.version))
        self._busy_s = self.idle_s = 0.0

    def _push(self) -> None:
        left = what_is_left(self.trainer) if self._standby else {}
        self._weights.push(self.trainer.version, self.trainer.weights() | left)

    def _save(self, folder: Path, also: Mapping[str, bytes]) -> None:
        """Asked again, by a control plane that did not hear the answer, there is nothing to do. What another attempt at
        the run left under the same name is replaced."""
        if not folder.is_dir() or any(content != _content(folder / name) for name, content in also.items()):
            save(self.trainer, folder, tokenizer=self._tokenizer, also=also, replace=True)
        self._send(Saved(str(folder), self.trainer.version))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def serve(worker: TrainerWorker, link: Link) -> None:
    """Work until told to stop, or until the control plane is gone. What cannot be gone on from is said, then raised."""
    try:
        while True:
            began = time.perf_counter()
            messages = list(link.receive(None))
            worker.idle_s += time.perf_counter() - began
            if not worker.handle(messages):
                return
    except Gone:
        return
    except (StalenessError, FloatingPointError) as error:
        link.send(Broken(str(error)))
        raise


def facts(report: StepReport) -> dict[str, float]:
    """The numbers of a step for the log."""
    return {
        "groups": report.groups,
        "tokens": report.tokens,
        "reward": report.reward,
        "shaped_reward": report.shaped_reward,
        "loss": report.loss,
        "gradient_norm": report.gradient_norm,
        "learning_rate": report.learning_rate,
        "updates": report.updates,
        "groups_without_signal": report.groups_without_signal,
        "tokens_without_signal": report.tokens_without_signal,
        "max_staleness": report.max_staleness,
        **report.metrics,
    }
