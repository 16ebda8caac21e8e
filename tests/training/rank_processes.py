"""Ranks of a sharded trainer for tests: real processes that talk by gloo, forked from one that has imported everything.

with RankProcesses(2, tmp_path) as ranks:
    ranks.call(updated, options, groups, [3, 3])      # what each rank returned
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import peft
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.servers.weights.parameter_server import LocalParameterServer
from staleflow.training import sharded_checkpoints
from staleflow.training.build import read_model
from staleflow.training.checkpoints import save
from staleflow.training.checksums import UNFINISHED
from staleflow.training.ranks import Ranks, meet
from staleflow.training.sharded import ShardedTrainer
from staleflow.training.sharded_store import RankedServer
from staleflow.training.standby import Standby, state
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.forked import START_S, context

__all__ = ["peft", "sharded_checkpoints"]


class RankProcesses:
    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context().Pipe()
            process = context().Process(target=_serve, args=(rank, size, folder / f"meet-{size}", theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(ranks, *args)`` on every rank; an error there is one here."""
        for pipe in self._pipes:
            pipe.send((function, args))
        found: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(START_S), f"rank {rank} does not answer"
            error, value = pipe.recv()
            assert not error, f"rank {rank}: {error}"
            found.append(value)
        return found

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(30)


def _serve(rank: int, size: int, at: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    ranks = meet(rank, size, at, "cpu")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(("", function(ranks, *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def model_of(tied: bool = False, kind: torch.dtype = torch.float64) -> Any:
    """Sizes that no two or three ranks divide evenly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=20,
        intermediate_size=35,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        vocab_size=13,
        tie_word_embeddings=tied,
    )
    return cast(Any, LlamaForCausalLM(config)).to(kind)


def fed(trainer: Trainer, groups: Sequence[Any], pieces: Sequence[int]) -> Any:
    """The report of a step that comes in these pieces."""
    begin = 0
    for size in pieces:
        trainer.feed(trainer.version, groups[begin : begin + size])
        trainer.flush()
        begin += size
    return trainer.finish(trainer.version)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def updated(
    ranks: Ranks, options: TrainerOptions, steps: Sequence[Any], pieces: Sequence[int], tied: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[Any]]:
    """The trained parameters after these steps, the weights for engines, and the reports."""
    trainer = ShardedTrainer(model_of(tied), options, ranks)
    reports = [replace(fed(trainer, groups, pieces), early_s=0.0) for groups in steps]
    weights = {name: whole(each) for name, each in trainer.weights().items()}
    return [whole(each) for each in trainer.parameters], weights, reports


def held(ranks: Ranks, options: TrainerOptions, groups: Sequence[Any]) -> int:
    """Bytes of weights, gradients and moments before an update."""
    trainer = ShardedTrainer(model_of(), options, ranks)
    trainer.feed(0, groups)
    trainer.flush()
    return state_bytes(trainer)


class HalfTrainer(ShardedTrainer):
    """As on a GPU: gathered in bfloat16."""

    _half = True  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]


def half_gradients(ranks: Ranks, options: TrainerOptions, groups: Sequence[Any]) -> list[torch.Tensor]:
    trainer = HalfTrainer(model_of(kind=torch.float32), options, ranks)
    trainer.feed(0, groups)
    trainer.flush()
    return [whole(cast(Any, each.grad)) for each in trainer.parameters]


def state_bytes(trainer: Trainer) -> int:
    tensors = [*trainer.model.parameters(), *(each.grad for each in trainer.parameters)]
    tensors += [value for state in trainer.optimiser.state.values() for value in state.values() if value.ndim]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}
    return sum(memory.values())


def continued(
    ranks: Ranks,
    options: TrainerOptions,
    steps: Sequence[Any],
    load_from: Path | None = None,
    save_to: Path | None = None,
    base: Path | None = None,
) -> dict[str, torch.Tensor]:
    """The whole state of a trainer after these steps, from a checkpoint on and with one written at the end."""
    trainer = ShardedTrainer(read_model(base) if base else model_of(kind=torch.float32), options, ranks)
    if load_from is not None:
        sharded_checkpoints.load(trainer, load_from)
    for groups in steps:
        fed(trainer, groups, [len(groups)])
    if save_to is not None and ranks.leads:
        save(trainer, save_to, write=cast(Any, sharded_checkpoints.write))
    elif save_to is not None:
        sharded_checkpoints.write(trainer, save_to.parent / f"{UNFINISHED}{save_to.name}")
    return {name: whole(each) for name, each in state(trainer).items()}


def failing(ranks: Ranks, at: int) -> str:
    """What each rank hears when one of them cannot write."""

    def write() -> None:
        if ranks.rank == at:
            raise OSError("no space left")

    try:
        ranks.together(write)
    except OSError as error:
        return str(error)
    return ""


class Stores:
    """Those that stay open between two calls."""

    weights: RankedServer
    standby: Standby


def pushed(
    ranks: Ranks, name: str, folder: Path, options: TrainerOptions, steps: Sequence[Any]
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The weights of every version, which all ranks push, and the state at the end, which they keep."""
    trainer = ShardedTrainer(model_of(kind=torch.float32), options, ranks)
    stores = [LocalParameterServer.create(each) if ranks.leads else None for each in (name, f"{name}-standby")]
    Stores.weights = RankedServer(ranks, name, stores[0])
    kept = RankedServer(ranks.beside(), f"{name}-standby", stores[1])
    Stores.standby = Standby(kept, folder if ranks.leads else None)
    found: list[dict[str, torch.Tensor]] = []
    for groups in steps:
        fed(trainer, groups, [len(groups)])
        Stores.weights.push(trainer.version, trainer.weights())
        found.append({key: whole(each) for key, each in trainer.weights().items()})
        Stores.standby.copy(trainer)
        Stores.standby.wait()
    return found, {name: whole(each) for name, each in state(trainer).items()}


def revived(ranks: Ranks, options: TrainerOptions) -> tuple[int, dict[str, torch.Tensor]]:
    """Another trainer at the state that was kept."""
    trainer = ShardedTrainer(model_of(kind=torch.float32), options, ranks)
    version = Stores.standby.revive(trainer)
    return version, {name: whole(each) for name, each in state(trainer).items()}


def closed(_ranks: Ranks) -> None:
    Stores.weights.close()
    Stores.standby.close()
