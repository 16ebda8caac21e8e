"""The section ``cluster``: the cluster that ``simulate``, ``compare`` and ``plan`` model. ``train`` does not read it.

What is null follows from the rest of the configuration, and is an assumption that the commands name
(``staleflow.simulate.setting.assumptions``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Literal

from staleflow.config.gpus import GPUS, named_gpu
from staleflow.settings import Amount, Count, Positive, Range, Section, Share, Whole

if TYPE_CHECKING:
    from staleflow.config.schema import Config

LengthKind = Literal["independent", "correlated", "long", "lognormal", "powerlaw", "bimodal", "uniform", "constant"]
COEFFICIENTS = ("floor", "base", "per_sequence", "fixed", "per_context_token", "per_prefill_token")
"""The fields of ``CostModel``, which is not imported here: it needs numpy."""


@dataclass(frozen=True, slots=True)
class ClusterOptions(Section):
    gpu: str | None = None
    """Kind of the GPUs, one of those in ``config/gpus.py``: what is not given below follows from it and from the
    model's geometry. null: a GPU of 2 TB/s and 400 TFLOP/s, or a CPU core."""
    training_gpus: Count = 1
    """They divide the trainer's time."""
    gpus_per_instance: Count = 1
    """GPUs of an instance, only to count them: costs are those of a whole instance."""
    lengths: LengthKind = "lognormal"
    """Lengths of responses. As in production serving of DeepSeek-R1: ``correlated`` within a group, ``independent``, or
    ``long`` (correlated, four times as long). Otherwise ``lognormal`` (CV 1), ``powerlaw`` (tail 1.5), ``bimodal`` (a
    fifth is six times as long), ``uniform`` or ``constant``. ``rollout.max_tokens`` cuts them off."""
    mean_tokens: Positive | None = None
    """Mean length of a response before the cut; null: that of R1 (1,527), or a quarter of ``rollout.max_tokens``."""
    between: Share | None = None
    """Share of the variance of lengths that lies between prompts; null: 0 if independent, otherwise 0.7."""
    scale: Positive = 1.0
    """A factor on all lengths."""
    drift: Annotated[float, Range(-0.999, 0.999)] = 0.0
    """Growth of lengths with each version."""
    trace: str | None = None
    """A CSV file of recorded lengths with the column output_tokens and perhaps prompt_tokens and group. It replaces the
    settings above, except scale and drift."""
    prompt_tokens: Count | None = None
    """Length of every prompt, unless a trace has recorded it; null: the longest allowed."""
    prompts: Count | None = None
    """Prompts in the data; null: endless."""
    profile: str | None = None
    """What engine steps cost, as ``staleflow profile`` measured it. It replaces ``costs``."""
    costs: dict[str, float] = field(default_factory=dict[str, float])
    """The coefficients of an engine step (``staleflow/coordinator/cost.py``); none: from the model's geometry and the
    GPU."""
    trainer_per_token_gpu_s: Positive | None = None
    """GPU seconds to train one prompt or output token; null: from the model's geometry."""
    trainer_fixed_s: Amount = 0.0
    """Seconds of the update in each step."""
    push_s: Amount = 0.0
    """Seconds of the push in each step."""
    reshard_s: Amount = 15.0
    """Seconds in each step in which GPUs that do both change from rollout to training and back: of the policies that
    are compared, ``synchronous``. 0 in presets for one machine."""
    weight_bytes: Positive | None = None
    """Bytes that a pull loads; null: four for each parameter."""
    link_bandwidth: Positive = 40e9
    """Bytes per second of one pull."""
    total_bandwidth: Positive = 1e15
    """Bytes per second of all pulls together."""
    reward_s: Amount = 0.0
    """Mean seconds until a reward is there."""
    turns: Count = 1
    """Turns of an episode, which share its tokens evenly; 1: a response is one turn, and no environment plays."""
    tool_s: Amount = 0.0
    """Mean seconds that an environment takes between two turns."""
    tool_tokens: Whole = 0
    """Tokens that it gives to the model for each further turn."""
    reward_success: Share = 0.5
    """Share of rewards that are 1, where groups are filtered."""
    speed_spread: Annotated[float, Range(0, 0.999)] = 0.0
    """Instances run at speeds between 1 - this and 1 + this."""
    cycle_s: Positive = 0.05
    """At most one decision in this time."""

    def contradictions(self) -> Iterator[str]:
        if self.gpu is not None and named_gpu(self.gpu) is None:
            yield (
                f"gpu={self.gpu} is unknown: choose one of {', '.join(GPUS)}, or give cluster.costs and "
                "cluster.trainer_per_token_gpu_s as measured on it"
            )
        costs = self.costs
        if unknown := sorted(costs.keys() - set(COEFFICIENTS)):
            yield f"costs.{unknown[0]} is unknown: choose one of {', '.join(COEFFICIENTS)}"
        elif costs and (missing := [name for name in COEFFICIENTS if name not in costs]):
            yield f"costs lacks {', '.join(missing)}: give all coefficients, or a profile"
        elif costs and not takes_time(costs):
            yield "costs has a step that takes no time: give coefficients of 0 or more (base: any), and a floor"
        if self.turns == 1 and (self.tool_s or self.tool_tokens):
            yield "tool_s and tool_tokens are of what happens between turns: give turns=2 or more, or leave them out"
        if self.lengths == "independent" and self.between:
            yield f"lengths=independent says what between={self.between:g} is: leave one out"
        if self.lengths == "long" and self.scale != 1:
            yield f"lengths=long says what scale={self.scale:g} is: leave one out"


def takes_time(costs: Mapping[str, float]) -> bool:
    """Whether every engine step does. The line that grows with sequences may begin below zero, nothing else may."""
    least = min(value for name, value in costs.items() if name != "base")
    one = max(costs["floor"], costs["base"] + costs["per_sequence"]) + costs["fixed"]
    return all(isfinite(value) for value in costs.values()) and least >= 0 and one > 0


def problems(config: "Config") -> Iterator[str]:
    """Contradictions between this section and the rest of the configuration."""
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
