"""Which settings a resumed run may change, and which would make it another run."""

from typing import Any

from staleflow.config.convert import leaves, to_tree
from staleflow.config.schema import Config

FREE = (
    "runs", "cache", "steps", "stop_at", "samples", "track", "track_arguments", "runtime",
    "rollout.instances", "rollout.kv_tokens", "training.ranks", "training.micro_tokens", "training.share_prompts",
    "training.activation_checkpointing", "training.offload_moments",
)  # fmt: skip
FREE_SECTIONS = ("processes", "evaluation", "checkpoints", "ray", "cluster")


READ: dict[str, tuple[str, ...]] = {
    "trainer": ("training.",),
    "instance": ("rollout.",),
    "evaluator": ("rollout.", "evaluation.", "checkpoints.best"),
}
"""By role, what a process reads when it starts of the settings that a resumed run may change."""
NOT_READ = ("rollout.instances",)


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
    return _differing(fixed_settings(before), fixed_settings(after))


def outdated(before: Config, after: Config) -> frozenset[str]:
    """The roles whose processes, started with one configuration, would not do what the other says."""
    one, two = (dict(leaves(to_tree(each))) for each in (before, after))
    changed = [name for name in _differing(one, two) if name not in NOT_READ]
    return frozenset(role for role, reads in READ.items() if any(name.startswith(reads) for name in changed))


def _differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return [name for name in one | two if one.get(name, ...) != two.get(name, ...)]
