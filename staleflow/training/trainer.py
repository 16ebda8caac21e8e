"""The trainer: gradients of a step's groups as they arrive, and one update when the last has come.

    trainer = Trainer(model, TrainerOptions(learning_rate=5e-4, max_staleness=2))
    trainer.feed(step=0, groups=[rows_of_one_group, ...])     # any number of times
    report = trainer.finish(step=0)                           # update; the model is version 1 now
    trainer.reset()                                           # forget what was fed: the step is fed again

Losses are kept as sums until the step is whole, so it does not matter in how many pieces it comes. What needs the whole
batch (``streamable``) is held until ``finish``. Before a group is used, the age of each token is checked: a trainer
that is given something beyond the bound stops and says which trajectory it was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from staleflow.servers.payloads import Row
from staleflow.training.advantages import GROUP_ADVANTAGES, reinforce_plus_plus
from staleflow.training.correction import Correction, decoupled, difference, masked_by_sequence, truncated, uncorrected
from staleflow.training.losses import POLICY_LOSSES, entropy_bonus, streamable
from staleflow.training.micro_batches import MicroBatch, micro_batches, policy
from staleflow.training.segments import SEQUENCE_MEAN, TOKEN_MEAN, LossSum, Metrics, Segments, scale_gradients

Group = Sequence[Row]


class StalenessError(RuntimeError):
    """A trajectory is older than the bound allows: a broken promise, not a bad setting."""


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    max_staleness: int
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++"] = "grpo"
    loss: Literal["ppo", "dapo", "gspo", "cispo"] = "dapo"
    correction: Literal["none", "truncated", "masked", "decoupled"] = "none"
    importance_cap: float = 2.0
    """For ``truncated``."""
    sequence_band: tuple[float, float] = (0.5, 2.0)
    """For ``masked``: sequences whose mean ratio leaves it are not trained on."""
    temperature: float = 1.0
    """Of the rollouts."""
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = None
    """Where a schedule that falls ends."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    entropy_coefficient: float = 0.0
    micro_tokens: int = 512
    """Tokens of one forward pass, about."""

    def __post_init__(self) -> None:
        problems = {
            f"max_staleness is {self.max_staleness}: give 0 or more": self.max_staleness < 0,
            f"temperature is {self.temperature}: give the one of the rollouts, above 0": not self.temperature > 0,
            f"learning_rate is {self.learning_rate}: give a number above 0": not self.learning_rate > 0,
            f"clip_norm is {self.clip_norm}: give a number above 0": not self.clip_norm > 0,
            f"micro_tokens is {self.micro_tokens}: give at least 1": self.micro_tokens < 1,
            f"warmup_steps is {self.warmup_steps}: give 0 or more": self.warmup_steps < 0,
            f"schedule={self.schedule} falls to an end: give total_steps too": self.schedule != "constant"
            and not self.total_steps,
            f"advantage {self.advantage!r} is unknown: use one of {', '.join((*GROUP_ADVANTAGES, 'reinforce++'))}": (
                self.advantage not in (*GROUP_ADVANTAGES, "reinforce++")
            ),
            f"loss {self.loss!r} is unknown: use one of {', '.join(POLICY_LOSSES)}": self.loss not in POLICY_LOSSES,
        }
        for problem, is_so in problems.items():
            if is_so:
                raise ValueError(problem)

    @property
    def whole_batch(self) -> str | None:
        """Why a step cannot be trained as it arrives; None if it can."""
        return streamable(self.advantage, self.loss)

    def rate(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or not self.total_steps:
            return self.learning_rate
        gone = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        share = 1 - gone if self.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.learning_rate * share


@dataclass(slots=True)
class StepReport:
    step: int
    groups: int
    tokens: int
    reward: float
    loss: float
    gradient_norm: float
    learning_rate: float
    max_staleness: int
    """Of any token, from the versions stamped on them."""
    token_staleness: Counter[int]
    metrics: dict[str, float]


@dataclass(slots=True)
class _Open:
    """What was fed of the step that is being trained."""

    loss: LossSum
    metrics: Metrics = field(default_factory=Metrics)
    groups: list[Group] = field(default_factory=list[Group])
    staleness: Counter[int] = field(default_factory=Counter[int])


class Trainer:
    def __init__(self, model: Any, options: TrainerOptions, version: int = 0) -> None:
        self.model = model
        self.options = options
        self.version = version
        """Updates made so far; step ``version`` is the one that is being trained."""
        self.parameters: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
        if not self.parameters:
            raise ValueError("every parameter of the model is frozen: leave some to train")
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay
        )
        self._aggregation = SEQUENCE_MEAN if options.loss == "gspo" else TOKEN_MEAN
        self._open = self._nothing()
        model.train()

    def feed(self, step: int, groups: Sequence[Group]) -> None:
        """Accumulate these groups, all of whose members are there."""
        if step != self.version:
            raise ValueError(
                f"groups of step {step} were fed while step {self.version} is trained: reset, then feed it"
            )
        for group in groups:
            for row in group:
                self._check_age(step, row)
        for version, count in (span for group in groups for row in group for span in row.spans):
            self._open.staleness[step - version] += count
        self._open.groups += groups
        if self.options.whole_batch is None:
            self._accumulate(groups)

    def finish(self, step: int) -> StepReport:
        """Update with everything that was fed; the model is the next version."""
        if step != self.version or not self._open.groups:
            raise ValueError(f"step {step} cannot be finished: step {self.version} has {len(self._open.groups)} groups")
        if self.options.whole_batch is not None:
            self._accumulate(self._open.groups)
        done = self._open
        scale_gradients(self.parameters, done.loss.scale)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip_norm)
        if not torch.isfinite(norm):
            self.reset()
            raise FloatingPointError(
                f"the gradient of step {step} is not finite: lower the learning rate, or look at its data"
            )
        rate = self.options.rate(step)
        for each in self.optimiser.param_groups:
            each["lr"] = rate
        self.optimiser.step()
        self.version += 1
        report = self._report(step, done, float(norm), rate)
        self.reset()
        return report

    def reset(self) -> None:
        """Forget what was fed since the last update."""
        self.optimiser.zero_grad(set_to_none=True)
        self._open = self._nothing()

    def _nothing(self) -> _Open:
        return _Open(LossSum.zero(self._aggregation))

    def _check_age(self, step: int, row: Row) -> None:
        for version, count in row.spans:
            age = step - version
            if not 0 <= age <= self.options.max_staleness:
                raise StalenessError(
                    f"trajectory {row.name} has {count} tokens of version {version}, {age} steps old at step {step}; "
                    f"the bound is {self.options.max_staleness}"
                )

    def _accumulate(self, groups: Sequence[Group]) -> None:
        rows = [row for group in groups for row in group]
        members = torch.tensor([at for at, group in enumerate(groups) for _ in group])
        rewards_N = torch.tensor([row.reward for row in rows], dtype=torch.float64)
        device, dtype = self.parameters[0].device, torch.promote_types(self.parameters[0].dtype, torch.float32)
        advantages_N = self._advantages(rows, rewards_N, members).to(dtype)
        for batch in micro_batches(rows, advantages_N, self.options.micro_tokens, device):
            loss = self._loss(batch)
            loss.total.backward()  # type: ignore[no-untyped-call]
            self._open.loss += loss.detach()

    def _advantages(self, rows: list[Row], rewards_N: Tensor, members_N: Tensor) -> Tensor:
        if self.options.advantage == "reinforce++":
            return reinforce_plus_plus(rewards_N, Segments.of([row.tokens.size for row in rows]))
        return GROUP_ADVANTAGES[self.options.advantage](rewards_N, members_N)

    def _loss(self, batch: MicroBatch) -> LossSum:
        options = self.options
        logprobs_T, entropy_T = policy(self.model, batch, options.temperature, options.entropy_coefficient > 0)
        self._open.metrics += difference(logprobs_T.detach(), batch.behaviour_T)
        self._open.metrics += Metrics({"policy_entropy": (entropy_T.detach().sum(), entropy_T.numel())})
        correction = self._correction(logprobs_T.detach(), batch)
        advantages_T = batch.segments.spread(batch.advantages_N)
        loss = POLICY_LOSSES[options.loss](logprobs_T, advantages_T, batch.segments, correction, self._aggregation)
        if options.entropy_coefficient:
            bonus = entropy_bonus(entropy_T, batch.segments, self._aggregation, correction.keep_N)
            loss = loss.plus(bonus, options.entropy_coefficient)
        return loss

    def _correction(self, proximal_T: Tensor, batch: MicroBatch) -> Correction:
        """With one update a step, the policy at its beginning is the present one."""
        match self.options.correction:
            case "truncated":
                return truncated(proximal_T, batch.behaviour_T, self.options.importance_cap)
            case "masked":
                return masked_by_sequence(proximal_T, batch.behaviour_T, batch.segments, *self.options.sequence_band)
            case "decoupled":
                return decoupled(proximal_T, batch.behaviour_T)
            case _:
                return uncorrected(batch.behaviour_T)

    def _report(self, step: int, done: _Open, norm: float, rate: float) -> StepReport:
        rows = [row for group in done.groups for row in group]
        return StepReport(
            step=step,
            groups=len(done.groups),
            tokens=sum(row.tokens.size for row in rows),
            reward=sum(row.reward for row in rows) / len(rows),
            loss=float(done.loss.mean),
            gradient_norm=norm,
            learning_rate=rate,
            max_staleness=max(done.staleness, default=0),
            token_staleness=done.staleness,
            metrics=(done.loss.metrics + done.metrics).values(),
        )
