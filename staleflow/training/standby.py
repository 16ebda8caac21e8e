"""What a trainer leaves to the one that takes its place, should it die.

    standby = Standby(LocalParameterServer.create("run-7-standby"), folder)
    standby.note(step, what_was_fed)                # before the version that it makes can be seen
    server.push(trainer.version, trainer.weights())
    standby.keep(trainer)                           # beside the next step
    standby.wait()                                  # before the next update

    version = standby.revive(trainer)               # in another process, after its death
    standby.noted(version)                          # what it was fed since, if another version can be seen already

All that makes a trainer what it is at a version is kept in a store of its own: trained parameters in full precision
(value head and adapters among them), the optimiser's moments, the state of the random number generators. Engines wait
for weights and not for this, so it is copied after they can be pulled, while the next step is computed. What was fed
is written down before: a trainer that dies in between is revived one version earlier and makes the same update again.
On a CPU that is the same to the last bit, on a GPU up to the order in which sums are rounded. What is frozen comes from
the folder, as when the run began.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from staleflow.servers.weights import LocalParameterServer, WeightsError
from staleflow.training.checkpoints import optimiser_state, restore_optimiser, trained_parameters
from staleflow.training.trainer import Trainer

NOTE = "fed.msgpack"


class Standby:
    def __init__(self, server: LocalParameterServer, folder: Path) -> None:
        self._server = server
        self._note = folder / NOTE
        self._pool = ThreadPoolExecutor(1, "standby")
        self._copying: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def newest(self) -> int:
        """The version that a trainer would be revived at; -1 if there is none."""
        return self._server.newest()

    def note(self, step: int, fed: Any) -> None:
        """Write down what the update of a step is made of, once the version before it is kept."""
        self.wait()
        draft = self._note.with_suffix(".draft")
        draft.write_bytes(msgspec.msgpack.encode((step, fed)))
        draft.replace(self._note)

    def noted(self, step: int, kind: Any) -> Any:
        """What the step was fed, as ``kind``."""
        found, fed = msgspec.msgpack.decode(self._note.read_bytes(), type=tuple[int, kind])
        if found != step:
            raise WeightsError(f"{self._note} is of step {found} and not of {step}: resume from a checkpoint")
        return fed

    def keep(self, trainer: Trainer) -> None:
        """Copy the trainer between two steps. Until that is done it may compute gradients, and not update."""
        self.wait()
        ready = torch.cuda.current_stream(trainer.device).record_event() if trainer.device.type == "cuda" else None
        self._copying = self._pool.submit(self._copy, trainer.version, state(trainer), ready)

    def wait(self) -> None:
        """Until the version that was given last is kept."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def _copy(self, version: int, tensors: dict[str, Tensor], ready: Any) -> None:
        if ready is None:
            self._server.push(version, tensors)
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            self._server.push(version, tensors)

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
        """Remove it: nobody will take this trainer's place."""
        self._pool.shutdown()
        self._server.close()
        self._note.unlink(missing_ok=True)

    def detach(self) -> None:
        """Leave it to the one that takes this trainer's place."""
        self._pool.shutdown()
        self._server.detach()


def state(trainer: Trainer) -> dict[str, Tensor]:
    """The trainer between two steps: its own tensors, which the next update changes."""
    return {name: tensor.detach() for name, tensor in (trained_parameters(trainer) | optimiser_state(trainer)).items()}
