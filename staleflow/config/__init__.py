"""The configuration of a run: typed, frozen, from a file and ``key=value``, checked before anything heavy is loaded.

config = load("run.yaml", ["staleness=1"])      # what was asked for, or ConfigError in one line
print(estimate(config).text())                  # processes and memory

What this machine, the model folder and the data say to it is asked by ``checks``, which most commands do not need.
"""

from staleflow.config.cluster import ClusterOptions
from staleflow.config.loading import load, to_yaml
from staleflow.config.machine import Machine, this_machine
from staleflow.config.memory import Estimate, estimate, settled
from staleflow.config.presets import PRESETS
from staleflow.config.resuming import differences
from staleflow.config.schema import Checkpoints, Config, Evaluation, Processes
from staleflow.coordinator.strategies import Strategies
from staleflow.errors import ConfigError
from staleflow.reward.options import Reward
from staleflow.rollout.options import Rollout
from staleflow.tasks.options import Data
from staleflow.training.options import Training

__all__ = [
    "PRESETS",
    "Checkpoints",
    "ClusterOptions",
    "Config",
    "ConfigError",
    "Data",
    "Estimate",
    "Evaluation",
    "Machine",
    "Processes",
    "Reward",
    "Rollout",
    "Strategies",
    "Training",
    "differences",
    "estimate",
    "load",
    "settled",
    "this_machine",
    "to_yaml",
]
