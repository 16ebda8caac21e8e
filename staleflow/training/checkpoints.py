"""Checkpoints: the model in Hugging Face format, and what the trainer needs to go on exactly where it was.

    save(trainer, run / "checkpoints" / "step-000100", tokenizer=folder_of_the_base_model)
    version = load(trainer, newest(run / "checkpoints"))

A checkpoint is written beside its place and renamed into it, so whatever has the name is whole; an unfinished one is
removed by the next save. Tensors are safetensors, the rest is JSON: nothing is unpickled.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from staleflow.training.trainer import Trainer

FORMAT = 1
OPTIMISER, STATE = "optimiser.safetensors", "trainer.json"
UNFINISHED = ".unfinished-"


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message says what to do."""


def save(trainer: Trainer, folder: str | Path, tokenizer: str | Path | None = None) -> None:
    """Write a checkpoint of the trainer between two steps. ``tokenizer``: a folder whose tokenizer files go along."""
    target = Path(folder)
    if target.exists():
        raise CheckpointError(f"{target} exists: a checkpoint is never overwritten, give another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)
    made = target.parent / f"{UNFINISHED}{target.name}"
    trainer.model.save_pretrained(made)
    for file in Path(tokenizer).glob("*token*") if tokenizer is not None else ():
        shutil.copy(file, made / file.name)
    save_file(_tensors(trainer), made / OPTIMISER)
    (made / STATE).write_text(json.dumps({"format": FORMAT, "version": trainer.version}))
    for file in made.iterdir():
        _sync(file)
    _sync(made)
    os.rename(made, target)
    _sync(target.parent)


def load(trainer: Trainer, folder: str | Path) -> int:
    """Bring a trainer with a model of the same shape to where it was saved. Returns its version."""
    source = Path(folder)
    try:
        state = json.loads((source / STATE).read_text())
        optimiser = load_file(source / OPTIMISER)
        weights = _weights(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} is no whole checkpoint ({error}): give another one") from error
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{source} has format {state['format']}, this version of StaleFlow reads {FORMAT}: update StaleFlow"
        )
    named = dict(trainer.model.named_parameters())
    for name, tensor in weights.items():
        if name in named and named[name].shape != tensor.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model has {tuple(named[name].shape)}: "
                "resume with the model that was trained"
            )
    trainer.reset()
    trainer.model.load_state_dict(weights, strict=False)
    for name, parameter in named.items():
        kept = {key.rpartition(" ")[2]: value for key, value in optimiser.items() if key.rpartition(" ")[0] == name}
        if kept:
            trainer.optimiser.state[parameter] = {key: value.clone() for key, value in kept.items()}
    torch.set_rng_state(optimiser["rng"])
    trainer.version = state["version"]
    return trainer.version


def newest(folder: str | Path) -> Path | None:
    """The whole checkpoint of the latest version in a folder of them."""
    found = [
        each for each in Path(folder).glob("*") if (each / STATE).is_file() and not each.name.startswith(UNFINISHED)
    ]
    return max(found, key=lambda each: json.loads((each / STATE).read_text())["version"], default=None)


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """The optimiser's state by ``parameter key``, and the random number generator's."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    found = {
        f"{names[id(parameter)]} {key}": value.contiguous()
        for parameter, state in trainer.optimiser.state.items()
        for key, value in state.items()
    }
    return found | {"rng": torch.get_rng_state()}


def _weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    if not found:
        raise FileNotFoundError("it has no model.safetensors")
    return found


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
