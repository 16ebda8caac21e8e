"""A run by the names of the simulator's settings."""

from dataclasses import asdict
from typing import Any

from staleflow.config import Config


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
