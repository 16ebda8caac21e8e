"""From the configuration to the options of the parts that a process loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from staleflow.config import Config
from staleflow.rollout.engine import Sampling

if TYPE_CHECKING:
    from staleflow.rollout.options import EngineOptions
    from staleflow.training.options import TrainerOptions


def sampling(config: Config, stop_tokens: Sequence[int], temperature: float | None = None) -> Sampling:
    """How rollouts are drawn; with another temperature, how they are evaluated."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop_tokens=tuple(stop_tokens),
        stop_strings=tuple(rollout.stop_strings),
    )


def engine_options(config: Config) -> EngineOptions:
    from staleflow.rollout.options import EngineOptions

    rollout = config.rollout
    return EngineOptions(
        kv_tokens=rollout.kv_tokens,
        max_running=rollout.max_running,
        prefill_tokens=rollout.prefill_tokens,
        dtype=rollout.dtype,
        device=rollout.device,
        kv_on_pull=rollout.kv_on_pull,
    )


def trainer_options(config: Config) -> TrainerOptions:
    """What is not named under ``training`` follows from the rest of the configuration."""
    from staleflow.training.options import TrainerOptions

    derived = {
        "max_staleness": config.staleness,
        "temperature": config.rollout.temperature,
        "total_steps": config.steps,
        "max_tokens": config.rollout.max_tokens,
    }
    named = {field.name for field in fields(TrainerOptions)}
    given = {field.name: getattr(config.training, field.name) for field in fields(config.training)}
    return TrainerOptions(**{key: value for key, value in (given | derived).items() if key in named})


def sizes(config: Config) -> dict[str, Any]:
    """The run by the names of the simulator's settings. One trainer counts as one GPU."""
    rollout = config.rollout
    return {
        "groups": config.groups,
        "group_size": config.group_size,
        "staleness": config.staleness,
        "redundancy": config.redundancy,
        "extra_members": config.extra_members,
        "instances": rollout.instances,
        "training_gpus": 1,
        "kv_tokens": rollout.kv_tokens,
        "max_running": rollout.max_running,
        "chunk": rollout.prefill_tokens,
        "strategies": asdict(config.strategies),
    }
