"""The trainer as a process: groups come in, versions go out to the parameter server.

    worker = TrainerWorker(trainer, weights, send, base=folder)
    worker.publish()                     # the version to begin with, and what another trainer would continue from
    worker.handle([Feed(0, groups), Finish(0)])

A new version is pushed before anything else is done with the step: instances wait for weights, and nobody waits for
a checkpoint, or for what would bring another trainer to this version. Groups that gathered while the trainer was busy
are packed into the same forward passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from staleflow.errors import line_of
from staleflow.servers.weights.parameter_server import ParameterServer
from staleflow.training.checkpoints import load, save
from staleflow.training.standby import Standby
from staleflow.training.trainer import StalenessError, StepReport, Trainer
from staleflow.types import (
    Broken,
    Feed,
    Finish,
    Moved,
    Pushed,
    Ready,
    Reset,
    Row,
    Save,
    Saved,
    Stop,
    TakeOver,
    Trained,
)
from staleflow.workers.link import Gone, Link

LOOK_S = 0.001
"""How often to look whether the device is done, while groups wait for it."""
SAY_S = 0.5
"""Signs of progress are no more frequent than this. After this time without work it says that it is idle."""
RETRY_S = 1.0
"""A disk that was full is tried again this often."""


class TrainerWorker:
    def __init__(
        self,
        trainer: Trainer,
        weights: ParameterServer,
        send: Callable[[msgspec.Struct], None],
        base: Path | None = None,
        standby: Standby | None = None,
        save: Callable[..., None] = save,
    ) -> None:
        """``standby``: where each version leaves what a trainer needs to take this one's place. ``save``: what writes
        checkpoints."""
        self.trainer = trainer
        self._began = time.perf_counter()
        """When the present step did."""
        self._fed: list[list[list[Row]]] = []
        """What the present step was fed, in the pieces in which it came."""
        self._handled = self._said = 0
        """Messages, and how many of them the control plane knows to be done with."""
        self._said_at = 0.0
        trainer.on_pass = self._move
        self._weights = weights
        self._send = send
        self._base = base
        self._standby = standby
        self._write = save

    def publish(self) -> None:
        """Make the present version available, if it is not yet: a trainer before this one may have done so."""
        if self._standby is not None and self._standby.newest() < self.trainer.version:
            self._standby.keep(self.trainer)
            self._standby.wait()
        if self._weights.newest() < self.trainer.version:
            self._push()
        self._began = time.perf_counter()

    def revive(self) -> bool:
        """Become the trainer that died, at the newest version that it has published; False if it left nothing."""
        if self._standby is None or self._standby.newest() < 0:
            return False
        version = self._standby.revive(self.trainer)
        told = self._standby.told(Trained)
        if told is not None and told.step == version - 1:
            self._send(told)  # it may have died before it was heard
        for step in range(version, self._weights.newest()):
            for groups in self._standby.noted(step, list[list[list[Row]]]):
                self.trainer.feed(step, groups)
            self._tell(step, self.trainer.finish(step), 0.0, 0.0)  # it may have died before it could
        return True

    def load(self, folder: str) -> None:
        """Become the trainer that wrote this checkpoint."""
        load(self.trainer, folder)

    def handle(self, messages: Iterable[Any]) -> bool:
        """Do what they say, in order. False once one of them says to stop. Without messages: report that it is idle."""
        groups: list[list[Row]] = []
        step, missing, handled = -1, 0, 0
        for handled, message in enumerate(messages, 1):  # counted when all of it is done
            if isinstance(message, Feed):
                step, missing = message.step, message.missing
                groups += message.groups
                continue
            self._feed(step, groups, missing)
            groups = []
            match message:
                case Finish(step=finished, groups=count):
                    if count and (fed := sum(map(len, self._fed))) != count:
                        raise ValueError(f"step {finished} has {count} groups, the trainer was fed {fed}")
                    self._finish(finished)
                case Reset():
                    self.trainer.reset()
                    self._fed, self._began = [], time.perf_counter()
                case Save(folder=folder, also=also):
                    self._save(Path(folder), also)
                case TakeOver():
                    self._handled, self._said = -handled, 0  # it counts what it sends itself
                    self._send(Ready(self.trainer.version))
                case Stop():
                    return False
        self._feed(step, groups, missing)
        self._handled += handled
        if not handled and not self.trainer.due and self._said < self._handled:
            self._said = self._handled
            self._send(Moved(self._handled))
        return True

    @property
    def wait_s(self) -> float | None:
        """How long to wait for the next message: without limit once everything is done and said."""
        if self.trainer.due:
            return LOOK_S
        return SAY_S if self._said < self._handled else None

    def _move(self) -> None:
        if (now := time.perf_counter()) - self._said_at >= SAY_S:
            self._said_at = now
            self._send(Moved(self._said))

    def _feed(self, step: int, groups: list[list[Row]], missing: int) -> None:
        if groups:
            self._fed.append(groups)
            self.trainer.feed(step, groups, missing)
            self._move()  # it may gather for long, and is not idle

    def _finish(self, step: int) -> None:
        asked = time.perf_counter()
        self._note(step)
        if self._standby is not None:
            self.trainer.flush()
            self._standby.wait()
        report = self.trainer.finish(step)
        self._push()
        ended = time.perf_counter()
        busy_s = min(report.early_s + ended - asked, ended - self._began)
        told = self._tell(step, report, busy_s, ended - self._began - busy_s)
        self._send(Pushed(self.trainer.version))
        if self._standby is not None:
            self._standby.keep(self.trainer, told)
        self._fed, self._began = [], ended

    def _note(self, step: int) -> None:
        """A full disk is waited for: nobody could take this trainer's place after the step."""
        while self._standby is not None:
            try:
                return self._standby.note(step, self._fed)
            except OSError as error:
                self._send(Moved(self._said, f"the trainer cannot write what step {step} was fed ({error.strerror})"))
                time.sleep(RETRY_S)

    def _tell(self, step: int, report: StepReport, busy_s: float, idle_s: float) -> Trained:
        ages = dict(report.token_staleness), dict(report.trajectory_staleness)
        told = Trained(step, facts(report), *ages, busy_s, idle_s)
        self._send(told)
        return told

    def _push(self) -> None:
        if self.trainer.version > self._weights.newest():  # or the step is made again where others have its version
            self._weights.push(self.trainer.version, self.trainer.weights())

    def _save(self, folder: Path, also: Mapping[str, bytes]) -> None:
        """Asked again, by a control plane that did not hear the answer, there is nothing to do. What another attempt at
        the run left under the same name is replaced. If it cannot be written (a full disk), the trainer continues."""
        why = ""
        if not folder.is_dir() or any(content != _content(folder / name) for name, content in also.items()):
            self._send(Moved(self._said, saves=True))
            try:
                self._write(self.trainer, folder, base=self._base, also=also, replace=True)
            except (OSError, SafetensorError) as error:
                why = line_of(error)
        self._send(Saved(str(folder), self.trainer.version, why))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def serve(worker: TrainerWorker, link: Link) -> None:
    """Work until told to stop, or until the control plane is gone. What ends the training is sent, then raised."""
    try:
        while worker.handle(list(link.receive(worker.wait_s))):
            worker.trainer.advance()
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
