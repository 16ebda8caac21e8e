"""What engine steps and training cost: as measured or given, or a rough estimate from the model's geometry.

engine_costs(config)            # of the section cluster: its profile, its coefficients, or the estimate
costs_from_geometry(config)     # for the coordinator of a real run until it has measured
"""

import json
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleflow.config.cluster import COEFFICIENTS, takes_time
from staleflow.config.gpus import COMMON, Gpu, named_gpu
from staleflow.config.schema import Config
from staleflow.config.sizes import Sizes, read_sizes, sizes_of
from staleflow.coordinator.cost import CostModel
from staleflow.errors import ConfigError
from staleflow.rollout.shapes import LARGE

CORE = Gpu("CPU core", 0, 1e10, 4e10)
"""Rough peaks."""
TRAINING_FLOP = 8
"""Operations for each parameter and token: forward, backward, and forward again to recompute activations."""
TRAINING_SHARE = 0.4
"""Share of the peak that training reaches."""


def engine_costs(config: Config) -> CostModel:
    if config.cluster.profile is not None:
        return read_profile(config.cluster.profile)
    if config.cluster.costs:
        return CostModel(**config.cluster.costs)
    return costs_from_geometry(config, device_of(config, config.rollout.device), config.cluster.gpus_per_instance)


def device_of(config: Config, device: str) -> Gpu:
    """What the cluster has of this kind."""
    gpu = named_gpu(config.cluster.gpu) if config.cluster.gpu is not None else None
    return CORE if device == "cpu" else gpu or COMMON


def planned_sizes(config: Config) -> Sizes:
    """Of the model's folder, or of a model that is known by its name."""
    if (known := LARGE.get(config.model)) is not None:
        return read_sizes(config.model, known)
    try:
        return sizes_of(config)
    except ConfigError as error:
        names = "" if Path(config.model).is_dir() else f", or one of {', '.join(LARGE)} to plan with"
        raise ConfigError(f"{error}{names}") from None


def costs_from_geometry(config: Config, device: Gpu | None = None, gpus: int = 1) -> CostModel:
    """A rough cost of a decoding step, from the model's shape and the peaks of this number of GPUs; None: of a common
    kind. ``ConfigError`` if there is no such model."""
    sizes = planned_sizes(config)
    device = device or (CORE if config.rollout.device == "cpu" else COMMON)
    return CostModel.from_geometry(
        parameters=sizes.parameters,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_dim,
        bandwidth=gpus * device.bandwidth,
        flops=gpus * device.flops,
        bytes_per_value=4 if config.rollout.dtype == "float32" else 2,
    )


def training_cost(config: Config) -> float:
    """GPU seconds to train one token."""
    if config.cluster.trainer_per_token_gpu_s is not None:
        return config.cluster.trainer_per_token_gpu_s
    peak = device_of(config, config.training.device).flops
    return TRAINING_FLOP * planned_sizes(config).parameters / (TRAINING_SHARE * peak)


def weight_bytes(config: Config) -> float:
    """Bytes that a pull loads."""
    return config.cluster.weight_bytes or 4.0 * planned_sizes(config).parameters


def least_training_gpus(config: Config) -> int:
    """GPUs that hold the trainer's state; 1 if their kind is not known."""
    if config.cluster.gpu is None or config.training.device == "cpu":
        return 1
    sizes, training = planned_sizes(config), config.training
    trained = sizes.adapters(training.lora_rank, training.lora_targets) if training.lora_rank else sizes.parameters
    return device_of(config, training.device).training_gpus(sizes.parameters, trained)


def on_other_hardware(config: Config, given: Set[str]) -> Config:
    """The configuration with another model or kind of GPU: what is not ``given`` of costs and memory follows anew."""
    sizes, cluster, rollout, training = planned_sizes(config), config.cluster, config.rollout, config.training
    if cluster.gpu is not None:
        rollout = replace(rollout, device="cuda", dtype="bfloat16")
        training = replace(training, device="cuda")
    fresh: dict[str, Any] = {"costs": {}, "profile": None, "trainer_per_token_gpu_s": None}
    fresh["weight_bytes"] = 2.0 * sizes.parameters
    if rollout.device != "cpu":
        device = device_of(config, rollout.device)
        size = fresh["gpus_per_instance"] = device.instance_gpus(sizes)
        if "cluster.gpus_per_instance" in given:
            size = cluster.gpus_per_instance
        if "rollout.kv_tokens" not in given:
            rollout = replace(rollout, kv_tokens=max(1, device.kv_tokens(sizes, size)))
    longest = config.longest_prompt + rollout.max_tokens
    if longest > sizes.positions:
        raise ConfigError(
            f"a prompt of {config.longest_prompt} tokens and a response of rollout.max_tokens={rollout.max_tokens} are "
            f"longer than the {sizes.positions} positions of model={config.model}: give "
            f"rollout.max_tokens={max(1, sizes.positions - config.longest_prompt)} or less"
        )
    kept = {name: value for name, value in fresh.items() if f"cluster.{name}" not in given}
    if given & {"cluster.costs", "cluster.profile"}:
        kept = {name: value for name, value in kept.items() if name not in ("costs", "profile")}
    return replace(config, cluster=replace(cluster, **kept), rollout=rollout, training=training)


def read_profile(name: str) -> CostModel:
    """The coefficients in a file of ``staleflow profile``."""
    try:
        found = json.loads(Path(name).read_text())["coefficients"]
        values = {each: float(found[each]) for each in COEFFICIENTS}
    except OSError as error:
        raise ConfigError(f"profile {name} cannot be read ({error.strerror}): make it with staleflow profile") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"profile {name} holds no coefficients: make it with staleflow profile") from None
    if not takes_time(values):
        raise ConfigError(f"profile {name}: a step that takes no time is impossible: measure again")
    return CostModel(**values)
