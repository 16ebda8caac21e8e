"""What a trainer leaves to the one that takes its place, should it die.

    server.push(trainer.version, trainer.weights() | standby(trainer))

    trainer = build(folder, options)                                # in another process, after its death
    server = LocalParameterServer.take_over("run-7")
    version = revive(trainer, server)                               # exactly what the dead one was at its last version

All that makes a trainer what it is at a version is pushed with the weights, so a version is there with all of it or not
at all: trained parameters in full precision (value head and adapters among them), the optimiser's moments, the state of
the random number generators. What is frozen comes from the folder, as when the run began. The parameter server stores
a tensor that it is given twice once, so trained weights that engines get as they are take no further room.
"""

from __future__ import annotations

from torch import Tensor

from staleflow.servers.weights import PRIVATE, LocalParameterServer, WeightsError
from staleflow.training.checkpoints import optimiser_state, restore_optimiser, trained
from staleflow.training.trainer import Trainer


def standby(trainer: Trainer) -> dict[str, Tensor]:
    """The trainer between two steps, under private names. Its own tensors, which the next update changes."""
    whole = trained(trainer) | optimiser_state(trainer)
    return {f"{PRIVATE}{name}": tensor.detach() for name, tensor in whole.items()}


def revive(trainer: Trainer, server: LocalParameterServer) -> int:
    """Bring a trainer, built from the same folder with the same options, to the newest version. Returns it."""
    trainer.reset()
    into = standby(trainer)
    try:
        version = server.pull(into, verify=True)
    except WeightsError as error:
        raise WeightsError(
            f"the trainer cannot be revived ({error}): build it from the folder and with the options of the one before"
        ) from error
    server.forget()
    restore_optimiser(trainer, {name.removeprefix(PRIVATE): tensor for name, tensor in into.items()})
    trainer.version = version
    return version
