"""Which settings a resumed run may change, and which would make it another run."""

from typing import Any

from staleflow.config.convert import leaves, to_tree
from staleflow.config.schema import Config

FREE = (
    "runs", "cache", "steps", "stop_at", "samples", "track", "track_arguments", "runtime",
    "rollout.instances", "training.ranks",
)  # fmt: skip
FREE_SECTIONS = ("processes", "evaluation", "checkpoints", "ray", "cluster")


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings that change what is trained, by dotted name. With a falling learning rate, steps are one of them."""
    free = [name for name in FREE if name != "steps" or config.training.schedule == "constant"]
    return {
        name: value
        for name, value in leaves(to_tree(config))
        if name not in free and name.partition(".")[0] not in FREE_SECTIONS
    }


def differences(before: Config, after: Config) -> list[str]:
    """Dotted names of the settings that differ and that a resumed run may not change."""
    one, two = fixed_settings(before), fixed_settings(after)
    return [name for name in one | two if one.get(name, ...) != two.get(name, ...)]
