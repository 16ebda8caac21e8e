"""What engine steps and training cost: as measured or given, or a rough estimate from the model's geometry.

engine_costs(config)            # of the section cluster: its profile, its coefficients, or the estimate
costs_from_geometry(config)     # for the coordinator of a real run until it has measured
"""

import json
from pathlib import Path

from staleflow.config.cluster import COEFFICIENTS, takes_time
from staleflow.config.schema import Config
from staleflow.config.sizes import sizes_of
from staleflow.coordinator.cost import CostModel
from staleflow.errors import ConfigError

BANDWIDTH = {"cpu": 1e10, "cuda": 2e12}
FLOPS = {"cpu": 4e10, "cuda": 4e14}
"""Rough peaks of a device."""
TRAINING_FLOP = 8
"""For each parameter and token: forward, backward, and forward again where activations are recomputed."""
TRAINING_SHARE = 0.4
"""Share of the peak that training reaches."""


def engine_costs(config: Config) -> CostModel:
    if config.cluster.profile is not None:
        return read_profile(config.cluster.profile)
    return CostModel(**config.cluster.costs) if config.cluster.costs else costs_from_geometry(config)


def costs_from_geometry(config: Config) -> CostModel:
    """A rough cost of a decoding step, from the model's shape. ``ConfigError`` if there is no such model."""
    sizes, kind = sizes_of(config), config.rollout.device.partition(":")[0]
    return CostModel.from_geometry(
        parameters=sizes.parameters,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_dim,
        bandwidth=BANDWIDTH[kind],
        flops=FLOPS[kind],
        bytes_per_value=4 if config.rollout.dtype == "float32" else 2,
    )


def training_cost(config: Config) -> float:
    """GPU seconds to train one token."""
    if config.cluster.trainer_per_token_gpu_s is not None:
        return config.cluster.trainer_per_token_gpu_s
    peak = FLOPS[config.training.device.partition(":")[0]]
    return TRAINING_FLOP * sizes_of(config).parameters / (TRAINING_SHARE * peak)


def weight_bytes(config: Config) -> float:
    """Bytes that a pull loads."""
    return config.cluster.weight_bytes or 4.0 * sizes_of(config).parameters


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
