"""Which parameters of a model are trained: all, those that match patterns, or LoRA adapters added to its matrices.

    prepare(model, options)                     # in place
    with adapters_off(model): ...               # the model as it was before training
    merged_weights(model)["model.norm.weight"]  # what model.safetensors would hold

Adapters are injected in place, so that a model keeps its class and everything else works on it as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from staleflow.training.options import TrainerOptions

ADAPTER, BASE = ".lora_", ".base_layer."
"""Parts of the names that peft gives to an adapter's tensors, and to the matrix that it is added to."""
PEFT = "base_model.model."
"""What such names begin with in a file."""


def prepare(model: Any, options: TrainerOptions) -> None:
    """Add adapters, freeze what is not trained, and turn on activation checkpointing, as the options say."""
    if options.lora_rank:
        _inject(model, options)
    elif options.train_only:
        _freeze(model, options.train_only)
    if not any(each.requires_grad for each in model.parameters()):
        raise ValueError("every parameter of the model is frozen: leave some to train")
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Meanwhile the model is what it was before training."""
    layers = adapted(model)
    for layer in layers.values():
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name, W + (alpha / rank) B A where there is an adapter.

    Tied tensors appear under their first name only, as in a file. Tensors without an adapter share the model's memory.
    """
    deltas = {f"{name}.weight": layer.get_delta_weight("default") for name, layer in adapted(model).items()}
    found: dict[str, Tensor] = {}
    seen = set[int]()
    for key, tensor in model.state_dict().items():
        if ADAPTER in key or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        name = key.replace(BASE, ".")
        found[name] = tensor + deltas[name] if name in deltas else tensor
    return found


def adapters(model: Any) -> dict[str, Tensor]:
    """The adapters' own tensors."""
    return {name: each.detach() for name, each in model.named_parameters() if ADAPTER in name}


def lora_config(options: TrainerOptions, base: str | None = None) -> Any:
    """peft's own description of the adapters. ``base``: the folder of the model that they are added to."""
    from peft import LoraConfig, TaskType

    return LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # pyright: ignore[reportArgumentType] - it is only divided by the rank
        target_modules=list(options.lora_targets),
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
        inference_mode=base is not None,
    )


def to_peft(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of adapters under the names that they have in a file of peft."""
    return {f"{PEFT}{name.replace('.default.', '.')}": each for name, each in found.items()}


def from_peft(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """And back."""
    return {f"{name.removeprefix(PEFT).removesuffix('.weight')}.default.weight": each for name, each in found.items()}


def _inject(model: Any, options: TrainerOptions) -> None:
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise ValueError("lora_rank needs the package peft: install it, or leave lora_rank at 0") from None
    config = lora_config(options)
    found = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    if unknown := sorted(set(options.lora_targets) - found):
        raise ValueError(
            f"lora_targets: the model has no matrix {', '.join(unknown)}: use some of {', '.join(sorted(found))}"
        )
    with torch.random.fork_rng():
        torch.manual_seed(options.lora_seed)
        inject_adapter_in_model(config, model)


def _freeze(model: Any, patterns: tuple[str, ...]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"train_only: no parameter is named {pattern!r}: write a name such as {names[-1]}, or a pattern like "
                "model.layers.*"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


def adapted(model: Any) -> dict[str, Any]:
    return {name: each for name, each in model.named_modules() if hasattr(each, "get_delta_weight")}
