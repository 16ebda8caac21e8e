"""Checkpoints of a sharded trainer: the files of one process, written and read by all ranks, each its own rows.

write(trainer, folder)               # every rank, into a new folder; ``save`` does the rest on the first
version = load(trainer, folder)      # every rank; whatever number of ranks wrote it
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from staleflow.training.adapters import adapters
from staleflow.training.checkpoints import (
    OPTIMISER,
    RNG,
    SAME_BASE,
    VALUES,
    beside_model,
    check_shapes,
    check_trained,
    optimiser_state,
    other_base,
    restore_optimiser,
    saved_adapters,
    saved_version,
    whole,
    write_model,
)
from staleflow.training.part_files import RowFiles, local, place
from staleflow.training.part_files import write as write_parts
from staleflow.training.sharded import ShardedTrainer

MODEL = "model.safetensors"


def write(trainer: ShardedTrainer, folder: Path) -> None:
    """Model and tensors. ``OSError`` on every rank if any could not write."""
    files = {MODEL: trainer.weights()} | beside_model(trainer)

    def begin() -> None:
        if trainer.ranks.leads:
            write_model(trainer.model, folder, {})  # its shape; the tensors follow
            for name in files:
                (folder / name).parent.mkdir(exist_ok=True)

    trainer.ranks.together(begin)
    for name, tensors in files.items():
        write_parts(folder / name, tensors, trainer.ranks)


@torch.no_grad()
def load(trainer: ShardedTrainer, folder: str | Path) -> int:
    """As ``checkpoints.load``, of this rank's rows."""
    source, ranks, lora = Path(folder), trainer.ranks, bool(trainer.options.lora_rank)
    with whole(source):
        version = saved_version(source)
        model = RowFiles(sorted(source.glob("model*.safetensors")), ranks)
        moments = RowFiles([source / OPTIMISER], ranks)
        own = saved_adapters(source) if lora else {}
        own |= load_file(source / VALUES) if trainer.value_head is not None else {}
        if not model.shapes:
            raise FileNotFoundError("it has no model.safetensors")
        _ = moments.shapes[RNG]
    weights = trainer.weights()
    small = adapters(trainer.model) | (trainer.value_head.state_dict() if trainer.value_head is not None else {})
    saved = {name: torch.empty(shape, device="meta") for name, shape in model.shapes.items()}
    check_shapes(source, weights | small, saved | own)
    check_trained(source, trainer, moments.shapes)
    trainer.reset()
    for name, tensor in own.items():
        local(small[name]).copy_(tensor[place(small[name], ranks) or slice(None)])
    if lora:
        _check_base(source, trainer, model)
    else:
        model.read(weights)
    trainer.optimiser.forget()
    into = {name: each for name, each in optimiser_state(trainer).items() if name in moments.shapes}
    moments.read(into)
    restore_optimiser(trainer, into)
    trainer.version = version
    return version


def _check_base(source: Path, trainer: ShardedTrainer, model: RowFiles) -> None:
    for name, tensor in trainer.weights().items():
        if name in model.shapes:
            mine, its = local(tensor).cpu(), model.rows(name, tensor)
            differs = mine.to(its.dtype) - its
            every = trainer.ranks.gather([float(each.abs().max()) if each.numel() else 0.0 for each in (differs, its)])
            apart, largest = (max(each) for each in zip(*every, strict=True))
            if apart > SAME_BASE * largest:
                raise other_base(source, name)
