"""What a trainer can be told; contradictions are refused before anything is loaded.

TrainerOptions(max_staleness=2, advantage="gae", learning_rate=5e-5, whiten_advantages=True).whole_batch
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from staleflow.training.advantages import ADVANTAGES
from staleflow.training.correction import CORRECTIONS
from staleflow.training.losses import DUAL_CLIPPED, POLICY_LOSSES, streamable

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, as Llama, Mistral and Qwen name them."""
EMBEDDINGS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    max_staleness: int
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "gae"] = "grpo"
    """``gae`` is PPO with a value head."""
    loss: Literal["ppo", "dapo", "gspo", "cispo"] = "dapo"
    correction: Literal["none", "truncated", "masked", "decoupled"] = "none"
    importance_cap: float = 2.0
    """For ``truncated``."""
    sequence_band: tuple[float, float] = (0.5, 2.0)
    """For ``masked``: sequences whose mean ratio leaves it are not trained on."""
    temperature: float = 1.0
    """Of the rollouts."""

    # Rewards and advantages
    whiten_advantages: bool = False
    """To mean 0 and deviation 1 over all tokens of a step."""
    skip_no_signal: bool = True
    """Leave out groups whose advantages are all 0, also of the mean, unless another term of the loss needs them."""
    overlong_buffer: int = 0
    """Tokens before ``max_tokens`` over which rewards fall by up to ``overlong_penalty``; 0: they do not."""
    overlong_penalty: float = 1.0
    max_tokens: int | None = None
    """Most tokens that a rollout may generate."""
    gamma: float = 1.0
    gae_lambda: float = 0.95

    # Terms of the loss
    eps_low: float | None = None
    """Ratios are clipped to 1 - eps_low .. 1 + eps_high; None: the loss's own."""
    eps_high: float | None = None
    dual_clip: float | None = None
    """For ppo and dapo: beyond this ratio, tokens of negative advantage have no gradient; None: they all have."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """Of the divergence from the reference: the model as it was given to the trainer."""
    value_coefficient: float = 0.5
    value_clip: float = 0.2
    """How far from where the step began a value may gain by moving; felt with several updates a step."""

    # Updates
    updates_per_step: int = 1
    """Above 1, the groups of a step, in the order fed, are cut into so many mini-batches of one update each."""
    learning_rate: float = 1e-5
    value_learning_rate: float | None = None
    """Of the value head; None: as the model's."""
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = None
    """Where a schedule that falls ends."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    # The model
    lora_rank: int = 0
    """Above 0, only adapters of this rank are trained."""
    lora_alpha: float = 32.0
    """Adapters are added times this over their rank."""
    lora_targets: tuple[str, ...] = LINEAR
    """The last part of the names of the matrices that get adapters."""
    lora_seed: int = 0
    train_only: tuple[str, ...] = ()
    """Patterns of the names of parameters that are trained, such as ``model.layers.3.*``; none: all."""
    activation_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    autocast: Literal["auto", "off"] = "auto"
    """``auto``: matrix products in bfloat16 on a GPU."""
    micro_tokens: int = 1024
    """Tokens of one forward pass, about. The default is best on one CPU core; a GPU takes as many as fit."""

    def __post_init__(self) -> None:
        for problem, is_so in (self._numbers() | self._names() | self._contradictions()).items():
            if is_so:
                raise ValueError(problem)

    @property
    def whole_batch(self) -> str | None:
        """Why a step cannot be trained as it arrives; None if it can."""
        return streamable(self.advantage, self.loss, whitened=self.whiten_advantages, updates=self.updates_per_step)

    @property
    def clip(self) -> dict[str, float]:
        """What the loss is told of its clip."""
        told = {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip}
        return {name: value for name, value in told.items() if value is not None}

    @property
    def measures_first(self) -> bool:
        """Whether a pass without gradients must see the step before its first update.

        With several updates, the policy at the beginning of the step is no longer the present one; and values are
        needed for all rows before advantages can be whitened.
        """
        has_values = self.advantage == "gae"
        several = self.updates_per_step > 1 and (has_values or self.correction != "none")
        return several or (has_values and self.whiten_advantages)

    @property
    def skips(self) -> bool:
        """Whether groups without a signal are left out: nothing but their advantages would give a gradient."""
        others = self.kl_coefficient or self.entropy_coefficient or self.advantage == "gae"
        return self.skip_no_signal and not others

    def share(self, step: int) -> float:
        """Of the learning rates at a step: a linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant" or not self.total_steps:
            return 1.0
        gone = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1 - gone if self.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate * self.share(step)

    def _numbers(self) -> dict[str, bool]:
        not_negative = ("max_staleness", "warmup_steps", "overlong_buffer", "overlong_penalty", "entropy_coefficient")
        not_negative += ("kl_coefficient", "value_coefficient", "value_clip", "weight_decay", "lora_rank")
        positive = ("learning_rate", "clip_norm", "importance_cap", "lora_alpha", "value_learning_rate")
        given = {name: getattr(self, name) for name in (*not_negative, *positive)}
        low, high = self.sequence_band
        clip = {"eps_low": 0.0, "eps_high": 0.0, "dual_clip": math.inf} | self.clip
        return {
            f"eps_low is {self.eps_low}: give 0 to 1, where 1 turns the lower clip off": not 0 <= clip["eps_low"] <= 1,
            f"eps_high is {self.eps_high}: give 0 or more, where inf turns the upper clip off": (
                not clip["eps_high"] >= 0
            ),
            f"dual_clip is {self.dual_clip}: give a ratio above 1, such as 3": not clip["dual_clip"] > 1,
            f"temperature is {self.temperature}: give the one of the rollouts, above 0": not self.temperature > 0,
            f"micro_tokens is {self.micro_tokens}: give at least 1": self.micro_tokens < 1,
            f"updates_per_step is {self.updates_per_step}: give at least 1": self.updates_per_step < 1,
            f"sequence_band is ({low}, {high}): give 0 < low <= 1 <= high": not 0 < low <= 1 <= high,
            f"gamma is {self.gamma}: give 0 to 1": not 0 <= self.gamma <= 1,
            f"gae_lambda is {self.gae_lambda}: give 0 to 1": not 0 <= self.gae_lambda <= 1,
            **{f"{name} is {given[name]}: give 0 or more": not given[name] >= 0 for name in not_negative},
            **{
                f"{name} is {given[name]}: give a number above 0": given[name] is not None and not given[name] > 0
                for name in positive
            },
        }

    def _names(self) -> dict[str, bool]:
        known = {
            "advantage": ADVANTAGES,
            "loss": tuple(POLICY_LOSSES),
            "correction": CORRECTIONS,
            "schedule": ("constant", "linear", "cosine"),
            "autocast": ("auto", "off"),
        }
        return {
            f"{option} {getattr(self, option)!r} is unknown: use one of {', '.join(names)}": (
                getattr(self, option) not in names
            )
            for option, names in known.items()
        }

    def _contradictions(self) -> dict[str, bool]:
        buffer, most = self.overlong_buffer, self.max_tokens
        embedded = [each for each in self.lora_targets if each in EMBEDDINGS]
        return {
            f"schedule={self.schedule} falls to an end: give total_steps too": self.schedule != "constant"
            and not self.total_steps,
            f"overlong_buffer={buffer} with max_tokens={most}: give max_tokens too, at least the buffer": buffer > 0
            and (most is None or most < buffer),
            "lora_rank and train_only are both given: LoRA trains its adapters and nothing else, leave one out": (
                self.lora_rank > 0 and bool(self.train_only)
            ),
            f"lora_targets has {', '.join(embedded)}: adapt matrices inside the layers, such as q_proj": bool(embedded),
            "lora_targets is empty: name a matrix such as q_proj, or leave lora_rank at 0": (
                self.lora_rank > 0 and not self.lora_targets
            ),
            "value_learning_rate is given without a value head: use advantage gae, or leave it out": (
                self.value_learning_rate is not None and self.advantage != "gae"
            ),
            f"loss {self.loss} has no dual_clip: leave it out, or use {' or '.join(DUAL_CLIPPED)}": (
                self.dual_clip is not None and self.loss not in DUAL_CLIPPED
            ),
            "advantage reinforce++ is whitened already: leave whiten_advantages out": (
                self.whiten_advantages and self.advantage == "reinforce++"
            ),
        }
