"""Checkpoints: the model in Hugging Face format, and what the trainer needs to resume exactly.

    save(trainer, run / "checkpoints" / "step-000100", base=folder_of_the_base_model)
    version = load(trainer, run / "checkpoints" / "step-000100")

A checkpoint is written under another name, sealed with the checksums of its files (``checksums.py``) and renamed, so
whatever has the final name was whole; an unfinished one is removed by the next save. Tensors are safetensors, the rest
is JSON: nothing is unpickled.

    model.safetensors, config.json   the model, adapters merged in: ``AutoModelForCausalLM.from_pretrained`` loads it
    tokenizer.json, ...              tokenizer, chat template and generation config of the base model
    adapter/                         LoRA's own matrices: ``PeftModel.from_pretrained`` adds them to the base model
    value_head.safetensors           of PPO
    optimiser.safetensors            moments by parameter, and the state of the random number generators
    checksums.json                   of all of these
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from staleflow.errors import StaleFlowError, line_of
from staleflow.training.adapters import adapters, from_peft, lora_config, to_peft
from staleflow.training.checksums import OPTIMISER, REPLACED, SEALED, UNFINISHED, seal, sync
from staleflow.training.checksums import TRAINER as STATE
from staleflow.training.trainer import Trainer

FORMAT = 1
VALUES = "value_head.safetensors"
ADAPTER = "adapter"
"""A folder: beside ``adapter_config.json``, transformers would not take ``model.safetensors`` for the model."""
ADAPTERS = "adapters.safetensors"
"""What earlier releases wrote instead."""
BESIDE = (
    *("*token*", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "additional_chat_templates", "generation_config.json"),
)
"""What a model folder has beside its weights and its shape."""
RNG, CUDA_RNG = "rng", "rng cuda"
SAME_BASE = 1e-5
"""Merged weights of the same base differ by no more than this between machines, relative to the largest."""


class CheckpointError(StaleFlowError, ValueError):
    """The checkpoint cannot be used; the message says what to do."""


def save(
    trainer: Trainer,
    folder: str | Path,
    base: str | Path | None = None,
    also: Mapping[str, bytes] | None = None,
    replace: bool = False,
    write: Callable[[Trainer, Path], None] | None = None,
) -> None:
    """Write a checkpoint of the trainer between two steps.

    ``base``: the folder of the base model, whose tokenizer, chat template and generation config are copied. ``also``:
    more files by name. ``replace``: an existing checkpoint of this name is removed once the new one is whole.
    ``write``: what writes model and tensors into a new folder, where this process does not hold them alone.
    """
    target = Path(folder)
    if target.exists() and not replace:
        raise CheckpointError(f"{target} exists: a checkpoint is never overwritten, give another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in (*target.parent.glob(f"{UNFINISHED}*"), *target.parent.glob(f"{REPLACED}*")):
        shutil.rmtree(left)
    made = target.parent / f"{UNFINISHED}{target.name}"
    try:
        (write or _write)(trainer, made)
        _complete(trainer, made, base, also or {})
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)  # on a full disk it would be in everybody's way
        raise
    if target.exists():
        os.rename(target, old := target.with_name(f"{REPLACED}{target.name}"))
        os.rename(made, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(made, target)
    sync(target.parent)


def _complete(trainer: Trainer, made: Path, base: str | Path | None, also: Mapping[str, bytes]) -> None:
    """Add what is not a tensor, and seal it."""
    (made / STATE).write_text(json.dumps({"format": FORMAT, "version": trainer.version, SEALED: True}))
    for each in {each for kind in BESIDE for each in Path(base).glob(kind)} if base is not None else ():
        (shutil.copytree if each.is_dir() else shutil.copy)(each, made / each.name)
    if trainer.options.lora_rank:
        onto = str(Path(base).resolve()) if base is not None else ""
        lora_config(trainer.options, onto).save_pretrained(made / ADAPTER)
    for name, content in also.items():
        if Path(name).name != name or (made / name).exists():
            raise CheckpointError(f"{name!r} cannot be a file beside the checkpoint's own: give another plain name")
        (made / name).write_bytes(content)
    seal(made)


def _write(trainer: Trainer, folder: Path) -> None:
    write_model(trainer.model, folder, trainer.weights())
    for name, tensors in beside_model(trainer).items():
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(tensors, folder / name)


def write_model(model: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    mine = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=mine.eos_token_id, pad_token_id=mine.pad_token_id)
    try:
        with quiet():
            model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = mine  # transformers refuses to write some that it reads; the base model's is copied


def beside_model(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """The tensors that a checkpoint has beside the model, by file."""
    files = {OPTIMISER: optimiser_state(trainer)}
    if trainer.value_head is not None:
        files[VALUES] = trainer.value_head.state_dict()
    if trainer.options.lora_rank:
        files[f"{ADAPTER}/adapter_model.safetensors"] = to_peft(adapters(trainer.model))
    return files


def load(trainer: Trainer, folder: str | Path) -> int:
    """Bring a trainer of the same model and options to where it was saved. Returns its version.

    With adapters, the model must have been built from the folder that the run began with; merged weights are compared.
    """
    source = Path(folder)
    with whole(source):
        version = saved_version(source)
        optimiser = load_file(source / OPTIMISER)
        weights = _weights(source)
        own = saved_adapters(source) if trainer.options.lora_rank else {}
        values = load_file(source / VALUES) if trainer.value_head is not None else {}
        _ = optimiser[RNG]
    check_shapes(source, trainer.weights() | adapters(trainer.model), weights | own)
    check_trained(source, trainer, optimiser)
    trainer.reset()
    if trainer.options.lora_rank:
        trainer.model.load_state_dict(own, strict=False)
        _check_base(source, trainer.weights(), weights)
    else:
        trainer.model.load_state_dict(weights, strict=False)
    if trainer.value_head is not None:
        trainer.value_head.load_state_dict(values)
    trainer.optimiser.forget()
    restore_optimiser(trainer, optimiser)
    trainer.version = version
    return version


@contextmanager
def whole(source: Path) -> Iterator[None]:
    """What cannot be read here makes the checkpoint one that cannot be used."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{source} is not a whole checkpoint for these options ({line_of(error)}): give another"
        ) from error


def saved_version(source: Path) -> int:
    state = json.loads((source / STATE).read_text())
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{source} has format {state['format']}, this version of StaleFlow reads {FORMAT}: update StaleFlow"
        )
    return state["version"]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers: a trainer is one of many processes that share a terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def trained_parameters(trainer: Trainer) -> dict[str, Tensor]:
    """The parameters that the optimiser changes, by name."""
    found = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    if trainer.value_head is not None:
        found |= {f"value_head.{name}": each for name, each in trainer.value_head.named_parameters()}
    return found


def optimiser_state(trainer: Trainer) -> dict[str, Tensor]:
    """The state of the optimiser, by ``parameter key``, and of the random number generators."""
    found = {
        f"{name} {key}": value.contiguous()
        for name, parameter in trained_parameters(trainer).items()
        for key, value in trainer.optimiser.state.get(parameter, {}).items()
    }
    found[RNG] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        found[CUDA_RNG] = torch.cuda.get_rng_state(trainer.device)
    return found


def restore_optimiser(trainer: Trainer, saved: Mapping[str, Tensor]) -> None:
    """Load what ``optimiser_state`` returned; moments that are not in it stay."""
    named = trained_parameters(trainer)
    for full, value in saved.items():
        name, _, key = full.rpartition(" ")
        if name in named:
            trainer.optimiser.state[named[name]][key].copy_(value)
    torch.set_rng_state(saved[RNG])
    if CUDA_RNG in saved and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(saved[CUDA_RNG], trainer.device)


def check_shapes(source: Path, mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in saved.items():
        if name not in mine or mine[name].shape != tensor.shape:
            its = tuple(mine[name].shape) if name in mine else "no such tensor"
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model has {its}: "
                "resume with the model that was trained"
            )


def check_trained(source: Path, trainer: Trainer, optimiser: Iterable[str]) -> None:
    saved = {full.rpartition(" ")[0] for full in optimiser if full not in (RNG, CUDA_RNG)}
    if saved and (apart := saved ^ trained_parameters(trainer).keys()):
        raise CheckpointError(
            f"{source} was not trained on the same parameters, such as {min(apart)}: resume with the same advantage, "
            "train_only and lora options"
        )


def _check_base(source: Path, mine: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    for name, tensor in saved.items():
        apart = (mine[name].cpu().to(tensor.dtype) - tensor).abs().max()
        if apart > SAME_BASE * tensor.abs().max():
            raise other_base(source, name)


def other_base(source: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: its adapters do not belong to this model's {name}: build the trainer from the folder that the run "
        "began with"
    )


def saved_adapters(folder: Path) -> dict[str, Tensor]:
    if (folder / ADAPTERS).exists():
        return load_file(folder / ADAPTERS)
    return from_peft(load_file(folder / ADAPTER / "adapter_model.safetensors"))


def _weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    if not found:
        raise FileNotFoundError("it has no model.safetensors")
    return found
