"""What a trainer leaves to the one that takes its place, should it die.

    standby = Standby(LocalParameterServer.create("run-7-standby"), folder)
    standby.note(step, what_was_fed)                # before the version that it makes can be seen
    server.push(trainer.version, trainer.weights())
    standby.keep(trainer, report)                   # beside the next step; the report may not have been heard
    standby.wait()                                  # before the next update

    version = standby.revive(trainer)               # in another process, after its death
    standby.told(kind)                              # the report that was kept with it
    standby.noted(version, kind)                    # what it was fed since, if later versions can be seen already

All that makes a trainer what it is at a version is kept in a store of its own: trained parameters in full precision
(value head and adapters among them), the optimiser's moments, the state of the random number generators. Engines wait
for weights and not for this, so it is copied after they can be pulled, while the next step is computed; where steps are
so short that the next update would often wait for it, only some versions are. What each step was fed is written down
before its version can be seen: a trainer is revived at the last version kept, and makes the updates since then again.
On a CPU they are the same to the last bit, on a GPU up to the order in which sums are rounded. What was said of the
step before them is written down too, for a control plane that did not hear it. What is frozen comes from the folder, as
when the run began.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from staleflow.servers.weights import WeightsError
from staleflow.training.checkpoints import optimiser_state, restore_optimiser, trained_parameters
from staleflow.training.fed import note_of, told_of
from staleflow.training.trainer import Trainer

MOST_BEHIND = 8
"""Updates that a trainer may have to make again."""


class Store(Protocol):
    """What is needed of a parameter server."""

    def push(self, version: int, tensors: Mapping[str, Tensor], /) -> Any: ...
    def newest(self) -> int: ...
    def pull(self, into: Mapping[str, Tensor], at_least: int = 0, *, verify: bool = False) -> int: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...
    def detach(self) -> None: ...


class Standby:
    def __init__(self, server: Store, folder: Path | None, share: float = 0.25) -> None:
        """``folder``: for what was fed; None: another rank writes that down. ``share``: of the time at most that copies
        take, but for ``MOST_BEHIND``."""
        self._server = server
        self._folder = folder
        self._share = share
        self._kept_at, self._copy_s = 0.0, 0.0
        """When the last copy began, and how long it took."""
        self._pool = ThreadPoolExecutor(1, "standby")
        self._copying: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def newest(self) -> int:
        """The version that a trainer would be revived at; -1 if there is none."""
        return self._server.newest()

    def note(self, step: int, fed: Any) -> None:
        """Write down what the update of a step is made of."""
        _write(self._note(step), fed)

    def noted(self, step: int, kind: Any) -> Any:
        """What the step was fed, as ``kind``."""
        try:
            return msgspec.msgpack.decode(self._note(step).read_bytes(), type=kind)
        except FileNotFoundError:
            raise WeightsError(f"{self._note(step)} is missing: resume from a checkpoint") from None

    def told(self, kind: Any) -> Any:
        """What ``keep`` was given last, as ``kind``; None if there is nothing."""
        assert self._folder is not None
        with suppress(FileNotFoundError):
            return msgspec.msgpack.decode(told_of(self._folder).read_bytes(), type=kind)
        return None

    def keep(self, trainer: Trainer, told: Any = None) -> None:
        """Copy the trainer between two steps, if it is time to. ``told``: what it said of the step that made its
        version; if that cannot be written (a full disk), the step is left to be made again."""
        self.wait()
        now, behind = time.perf_counter(), trainer.version - self._server.newest()
        if behind < MOST_BEHIND and (now - self._kept_at) * self._share < self._copy_s:
            return
        if told is not None and self._folder is not None:
            try:
                _write(told_of(self._folder), told)
            except OSError:
                return
        self.copy(trainer)

    def copy(self, trainer: Trainer) -> None:
        """Until that is done the trainer may compute gradients, and not update."""
        self.wait()
        self._kept_at = time.perf_counter()
        ready = torch.cuda.current_stream(trainer.device).record_event() if trainer.device.type == "cuda" else None
        self._copying = self._pool.submit(self._copy, trainer.version, state(trainer), ready)

    def wait(self) -> None:
        """Wait until the version that was given last is kept."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def _copy(self, version: int, tensors: dict[str, Tensor], ready: Any) -> None:
        if ready is None:
            self._server.push(version, tensors)
        else:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                self._server.push(version, tensors)
        self._copy_s = time.perf_counter() - self._kept_at
        self._forget(version)

    def _note(self, step: int) -> Path:
        assert self._folder is not None
        return note_of(self._folder, step)

    def _forget(self, before: int) -> None:
        """Delete what was fed to steps that will not be made again."""
        for note in self._folder.glob("fed-*.msgpack") if self._folder is not None else ():
            if note < self._note(before):
                note.unlink(missing_ok=True)

    def revive(self, trainer: Trainer) -> int:
        """Bring a trainer, built from the same folder with the same options, to the version kept last. Returns it."""
        trainer.reset()
        into = state(trainer)
        try:
            version = self._server.pull(into, verify=True)
        except WeightsError as error:
            raise WeightsError(
                f"the trainer cannot be revived ({error}): build it from the folder and with the options of the one "
                "before"
            ) from error
        self._server.forget()
        restore_optimiser(trainer, into)
        trainer.version = version
        return version

    def close(self) -> None:
        """Remove it: no other trainer will take this one's place."""
        self._pool.shutdown()
        self._server.close()
        self._forget(10**12)
        if self._folder is not None:
            told_of(self._folder).unlink(missing_ok=True)

    def detach(self) -> None:
        """Leave it to the one that takes this trainer's place."""
        self._pool.shutdown()
        self._server.detach()


def _write(path: Path, what: Any) -> None:
    """All of it, or nothing."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.msgpack.encode(what))
    draft.replace(path)


def state(trainer: Trainer) -> dict[str, Tensor]:
    """The trainer between two steps: its own tensors, which the next update changes."""
    return {name: tensor.detach() for name, tensor in (trained_parameters(trainer) | optimiser_state(trainer)).items()}
