"""The options of a trainer; contradictions are refused before anything is loaded.

``Training`` is the section of the configuration. ``TrainerOptions`` adds what follows from other sections::

    TrainerOptions(max_staleness=2, advantage="gae", learning_rate=5e-5, whiten_advantages=True).whole_batch

Losses, advantages and corrections have a registry each: a built-in is one function and one line here, the user's own is
``module:function``. What each kind of function takes and returns is in the module of the built-ins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from staleflow.registry import Entry, Registry
from staleflow.settings import Amount, Count, Device, Positive, Range, Section, Share, Whole, numbered

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, as Llama, Mistral and Qwen name them."""
EMBEDDINGS = ("embed_tokens", "lm_head")
CLIP = ("eps_low", "eps_high", "dual_clip")
"""The knobs of built-in losses; the signature of each shows which it has."""
AggregationKind = Literal["token-mean", "sequence-mean", "fixed-length"]


@dataclass(frozen=True, slots=True)
class Advantage(Entry):
    scope: Literal["group", "batch", "values"] = "batch"
    """What advantages depend on: the rewards of their own group, which can then be trained as it arrives; the whole
    batch; or a value head."""
    whitened: bool = False
    """Whether they are whitened already."""
    aggregation: AggregationKind | None = None
    """The aggregation that belongs to it; None: that of the loss."""


ADVANTAGES = Registry(
    "training.advantage",
    {
        "grpo": Advantage("staleflow.training.advantages:grpo", scope="group"),
        "dr_grpo": Advantage("staleflow.training.advantages:dr_grpo", scope="group", aggregation="fixed-length"),
        "rloo": Advantage("staleflow.training.advantages:rloo", scope="group"),
        "reinforce++": Advantage("staleflow.training.advantages:reinforce_plus_plus", whitened=True),
        "gae": Advantage("staleflow.training.advantages:gae", scope="values"),
    },
    takes=("rewards_N", "groups_N", "segments"),
)
LOSSES = Registry(
    "training.loss",
    {
        "ppo": Entry("staleflow.training.losses:ppo_clip"),
        "dapo": Entry("staleflow.training.losses:dapo"),
        "gspo": Entry("staleflow.training.losses:gspo"),
        "cispo": Entry("staleflow.training.losses:cispo"),
    },
    takes=("logprobs_T", "advantages_T", "segments", "correction", "aggregation"),
)
CORRECTIONS = Registry(
    "training.correction",
    {
        "none": Entry("staleflow.training.correction:uncorrected"),
        "truncated": Entry("staleflow.training.correction:truncated"),
        "masked": Entry("staleflow.training.correction:masked_by_sequence"),
        "decoupled": Entry("staleflow.training.correction:decoupled"),
    },
    takes=("proximal_T", "behaviour_T", "segments"),
)


@dataclass(frozen=True)
class Training(Section):
    advantage: Annotated[str, ADVANTAGES] = "grpo"
    """``grpo``, ``dr_grpo``, ``rloo``, ``reinforce++``, ``gae`` (PPO with a value head), or ``module:function``."""
    loss: Annotated[str, LOSSES] = "dapo"
    """``ppo``, ``dapo``, ``gspo``, ``cispo``, or ``module:function``."""
    correction: Annotated[str, CORRECTIONS] = "none"
    """For responses of older versions: none beyond the loss's own clipping, importance weights truncated by token,
    masked by sequence, decoupled PPO, or ``module:function``."""
    advantage_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to ``module:function``."""
    loss_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    correction_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    aggregation: Literal["auto", AggregationKind] = "auto"
    """How the losses of tokens become one number: a mean over tokens, a mean over responses of the mean over their
    tokens, or their sum over ``rollout.max_tokens`` for each response. ``auto``: what the loss goes with
    (``sequence-mean`` for gspo, ``token-mean`` for the others), and ``fixed-length`` with dr_grpo."""
    importance_cap: Annotated[float, Range(above=0, infinite=True)] = 2.0
    """Largest importance weight of ``truncated``."""
    sequence_band: Annotated[tuple[float, float], Range(infinite=True)] = (0.5, 2.0)
    """For ``masked``: sequences whose mean ratio is outside are not trained on."""

    # Rewards and advantages
    whiten_advantages: bool = False
    """To mean 0 and deviation 1 over all tokens of a step."""
    skip_no_signal: bool = True
    """Leave out groups whose advantages are all 0, from means too, unless another term of the loss needs them."""
    overlong_buffer: Whole = 0
    """Tokens before ``rollout.max_tokens`` over which rewards fall by up to ``overlong_penalty``; 0: they do not."""
    overlong_penalty: Amount = 1.0
    gamma: Share = 1.0
    """For ``gae``: the discount of a token."""
    gae_lambda: Share = 0.95

    # Terms of the loss
    eps_low: Share | None = None
    """Ratios are clipped to 1 - eps_low .. 1 + eps_high; null: the loss's own. 1 turns the lower clip off."""
    eps_high: Annotated[float, Range(0, infinite=True)] | None = None
    """.inf turns the upper clip off."""
    dual_clip: Annotated[float, Range(above=1)] | None = None
    """For ppo and dapo: beyond this ratio, tokens of negative advantage have no gradient; null: they all have."""
    entropy_coefficient: Amount = 0.0
    kl_coefficient: Amount = 0.0
    """Weight of the divergence from the model that the run began with."""
    value_coefficient: Amount = 0.5
    value_clip: Annotated[float, Range(0, infinite=True)] = 0.2
    """How far a value may move in a step and still lower the loss; matters with several updates per step."""

    # Updates
    updates_per_step: Count = 1
    """Above 1, the groups of a step, in the order fed, are split into this many mini-batches of one update each."""
    learning_rate: Positive = 1e-5
    value_learning_rate: Positive | None = None
    """Learning rate of the value head; null: that of the model."""
    warmup_steps: Whole = 0
    """Steps over which the learning rate rises to its value."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does between warm-up and the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: Amount = 0.0
    """Of AdamW."""
    clip_norm: Annotated[float, Range(above=0, infinite=True)] = 1.0
    """Largest norm of a gradient; .inf: it is not clipped."""

    # The model
    lora_rank: Whole = 0
    """Above 0, only adapters of this rank are trained."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by this over their rank."""
    lora_targets: tuple[str, ...] = LINEAR
    """The last part of the names of the matrices that get adapters."""
    lora_seed: Whole = 0
    train_only: tuple[str, ...] = ()
    """Patterns of the names of parameters that are trained, such as ``model.layers.3.*``; none: all."""
    activation_checkpointing: bool = False
    """Recompute activations instead of keeping them."""
    offload_moments: bool = False
    """Keep the optimiser's moments in the host's memory and bring them to the GPU for the update: 8 bytes less for each
    parameter, for as long as it takes to copy them."""
    autocast: Literal["auto", "off"] = "auto"
    """``auto``: matrix products in bfloat16 on a GPU."""
    micro_tokens: Count = 1024
    """Tokens of one forward pass, about. The default is best on one CPU core; on a GPU, as many as fit."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its responses of a pass, where it is long enough to gain by that. The
    gradients are the same up to rounding."""
    device: Device = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    ranks: Annotated[int, Range(1, 1024)] = 1
    """Processes that share the model, its gradients and the optimiser's state (FSDP2). On GPUs each has its own, from
    ``training.device`` on."""

    @property
    def devices(self) -> list[str]:
        """The GPU of each rank, or the CPU."""
        if self.device == "cpu":
            return [self.device]
        first = int(numbered(self.device).partition(":")[2])
        return [f"cuda:{first + rank}" for rank in range(self.ranks)]

    @property
    def has_values(self) -> bool:
        """Whether a value head is trained."""
        known = ADVANTAGES.entries.get(self.advantage)
        return known is not None and known.scope == "values"

    @property
    def clip(self) -> dict[str, float]:
        """The settings of the loss's clip that are given."""
        return {name: getattr(self, name) for name in CLIP if getattr(self, name) is not None}

    def contradictions(self) -> Iterator[str]:
        for knob in self.clip:
            if self.loss in LOSSES.entries and knob not in LOSSES.knobs(self.loss):
                having = ", ".join(loss for loss in LOSSES.entries if knob in LOSSES.knobs(loss))
                yield f"loss={self.loss} has no {knob}: leave it out, or give one of {having}"
        low, high = self.sequence_band
        if not 0 < low <= 1 <= high:
            yield f"sequence_band=[{low:g}, {high:g}]: give 0 < low <= 1 <= high, such as [0.5, 2]"
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas={list(self.betas)}: give two numbers from 0 to below 1, such as [0.9, 0.95]"
        if self.lora_rank and self.train_only:
            yield "lora_rank and training.train_only are both given: LoRA trains its adapters alone, leave one out"
        if self.lora_rank and not self.lora_targets:
            yield "lora_targets is empty: name a matrix such as q_proj, or leave training.lora_rank at 0"
        if embedded := [each for each in EMBEDDINGS if each in self.lora_targets]:
            yield f"lora_targets has {', '.join(embedded)}: adapt matrices inside the layers, such as q_proj"
        if self.offload_moments and self.device == "cpu":
            yield "offload_moments keeps moments off a GPU: give training.device=cuda, or leave it out"
        if self.offload_moments and self.ranks > 1:
            yield f"offload_moments with {self.ranks} ranks, which share them already: leave one of the two out"
        if self.value_learning_rate is not None and not self.has_values:
            yield "value_learning_rate is given without a value head: give training.advantage=gae, or leave it out"
        known = ADVANTAGES.entries.get(self.advantage)
        if self.whiten_advantages and known is not None and known.whitened:
            yield f"advantage={self.advantage} is whitened already: leave training.whiten_advantages out"


@dataclass(frozen=True)
class Bound:
    max_staleness: Whole
    """The bound, which the trainer checks for each token."""


@dataclass(frozen=True)
class TrainerOptions(Training, Bound):
    """The bound, the section ``training``, and what follows from other sections."""

    temperature: Positive = 1.0
    """Temperature of the rollouts."""
    max_tokens: Count | None = None
    """Most tokens of a response."""
    total_steps: Count | None = None
    """The step at which a falling schedule ends."""
    shares_gpu: bool = False
    """Whether instances compute on the same GPU: what is computed here, they wait for."""

    def contradictions(self) -> Iterator[str]:
        yield from Training.contradictions(self)
        if self.schedule != "constant" and not self.total_steps:
            yield f"schedule={self.schedule} falls to an end: give total_steps too"
        if self.overlong_buffer > (self.max_tokens or 0):
            yield (
                f"overlong_buffer={self.overlong_buffer} with max_tokens={self.max_tokens}: give max_tokens too, at "
                "least the buffer"
            )
        if self.aggregation == "fixed-length" and self.max_tokens is None:
            yield "aggregation=fixed-length divides by the longest response: give max_tokens too"

    @property
    def whole_batch(self) -> str | None:
        """Why a step cannot be trained as it arrives and still equal the whole batch; None if it can.

        A loss is a sum over tokens, so only advantages and several updates can prevent it.
        """
        entry = ADVANTAGES.entry(self.advantage)
        if self.whiten_advantages or entry.scope == "batch":
            how = "are whitened over" if self.whiten_advantages or entry.whitened else "may depend on all of"
            return f"{self.advantage} advantages {how} the batch: no gradient is known before the last reward"
        if self.updates_per_step > 1:
            return (
                f"a step of {self.updates_per_step} updates draws mini-batches from the whole batch: it streams with 1 "
                "update only"
            )
        return None

    @property
    def measures_first(self) -> bool:
        """Whether a pass without gradients must see the step before its first update.

        With several updates, the policy at the beginning of the step differs from the current one; and values are
        needed for all rows before advantages can be whitened.
        """
        several = self.updates_per_step > 1 and (self.has_values or self.correction != "none")
        return several or (self.has_values and self.whiten_advantages)

    @property
    def skips(self) -> bool:
        """Whether groups without a signal are left out: nothing but their advantages would give a gradient."""
        return self.skip_no_signal and not (self.kl_coefficient or self.entropy_coefficient or self.has_values)

    def share(self, step: int) -> float:
        """Share of the learning rates that a step uses: a linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant" or not self.total_steps:
            return 1.0
        gone = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1 - gone if self.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate * self.share(step)
