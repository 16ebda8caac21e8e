"""The section ``cluster``: what ``simulate``, ``compare`` and ``plan`` model and ``train`` has for real.

``train`` does not read it. What is null follows from the rest of the configuration, and is an assumption that the
commands name (``staleflow.simulate.setting.assumptions``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from staleflow.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.config.schema import Config

Lengths = Literal["independent", "correlated", "long", "lognormal", "powerlaw", "bimodal", "uniform", "constant"]
COEFFICIENTS = ("floor", "base", "per_sequence", "fixed", "per_context_token", "per_prefill_token")
"""The fields of ``CostModel``, which is not imported here: it needs numpy."""
LIMITS: tuple[tuple[str, float, float], ...] = (
    *((name, 1, 10**9) for name in ("training_gpus", "gpus_per_instance", "prompts", "prompt_tokens")),
    *((name, 0, 10**9) for name in ("trainer_fixed_s", "push_s", "reward_s")),
    *((name, 1e-12, 1e18) for name in ("trainer_per_token_gpu_s", "weight_bytes", "link_bandwidth", "total_bandwidth")),
    *((name, 1e-9, 1e12) for name in ("cycle_s", "mean_tokens", "scale")),
    *((name, 0, 1) for name in ("between", "reward_success")),
    ("speed_spread", 0, 0.999),
    ("drift", -0.999, 0.999),
)
"""Least and most of each."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    training_gpus: int = 1
    """They divide the trainer's time."""
    gpus_per_instance: int = 1
    """For counting only: costs are those of an instance."""
    lengths: Lengths = "lognormal"
    """Of responses. As in production serving of DeepSeek-R1: ``correlated`` within a group, ``independent``, or
    ``long`` (correlated, four times as long). Otherwise ``lognormal`` (CV 1), ``powerlaw`` (tail 1.5), ``bimodal`` (a
    fifth is six times as long), ``uniform`` or ``constant``. ``rollout.max_tokens`` cuts them off."""
    mean_tokens: float | None = None
    """Of a response, before it is cut off; null: that of R1 (1,527), or a quarter of ``rollout.max_tokens``."""
    between: float | None = None
    """Share of the variance of lengths that lies between prompts; null: 0 if independent, otherwise 0.7."""
    scale: float = 1.0
    """A factor on all lengths."""
    drift: float = 0.0
    """Growth of lengths with each version."""
    trace: str | None = None
    """A CSV file of recorded lengths with the columns prompt_tokens, output_tokens and perhaps group. It takes the
    place of the settings above, but for scale and drift."""
    prompt_tokens: int | None = None
    """Of every prompt; null: as many as a prompt may have."""
    prompts: int | None = None
    """Length of the data; null: endless."""
    profile: str | None = None
    """What engine steps cost, as ``staleflow profile`` measured it. It takes the place of ``costs``."""
    costs: dict[str, float] = field(default_factory=dict[str, float])
    """The coefficients of an engine step (``staleflow/coordinator/cost.py``); none: from the model's geometry."""
    trainer_per_token_gpu_s: float | None = None
    """GPU seconds to train one prompt or output token; null: from the model's geometry."""
    trainer_fixed_s: float = 0.0
    """Seconds of the update, for each step."""
    push_s: float = 0.0
    """Seconds of the push, for each step."""
    weight_bytes: float | None = None
    """What a pull loads; null: four bytes for each parameter."""
    link_bandwidth: float = 40e9
    """Bytes per second of one pull."""
    total_bandwidth: float = 1e15
    """Bytes per second of all pulls together."""
    reward_s: float = 0.0
    """Seconds until a reward is there, on average."""
    reward_success: float = 0.5
    """Share of rewards that are 1, where groups are filtered."""
    speed_spread: float = 0.0
    """Instances run at speeds between 1 - this and 1 + this."""
    cycle_s: float = 0.05
    """At most one decision in this time."""

    def __post_init__(self) -> None:
        for name, least, most in LIMITS:
            value: Any = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name}={value:g} is out of range: give a number from {least:g} to {most:g}")
        if unknown := sorted(self.costs.keys() - set(COEFFICIENTS)):
            raise ConfigError(f"costs.{unknown[0]} is unknown: choose one of {', '.join(COEFFICIENTS)}")
        if self.costs and (missing := [name for name in COEFFICIENTS if name not in self.costs]):
            raise ConfigError(f"costs lacks {', '.join(missing)}: give all coefficients, or a profile")
        if self.costs and (min(self.costs.values()) < 0 or self.costs["floor"] + self.costs["fixed"] <= 0):
            raise ConfigError("costs has a step that takes no time: give coefficients of 0 or more, and a floor")
        if self.lengths == "independent" and self.between:
            raise ConfigError(f"lengths=independent says what between={self.between:g} is: leave one out")
        if self.lengths == "long" and self.scale != 1:
            raise ConfigError(f"lengths=long says what scale={self.scale:g} is: leave one out")


def problems(config: "Config") -> Iterator[str]:
    """What contradicts the rest of the configuration."""
    cluster = config.cluster
    if cluster.prompts is not None and cluster.prompts < config.groups * config.steps:
        yield (
            f"cluster.prompts={cluster.prompts} are too few for {config.steps} steps of {config.groups} groups: "
            f"give {config.groups * config.steps} or more, or fewer steps"
        )
    if config.filter != "none" and cluster.reward_success in (0, 1):
        yield (
            f"filter={config.filter} drops every group with cluster.reward_success={cluster.reward_success:g}: "
            "give a share between 0 and 1, or filter=none"
        )
