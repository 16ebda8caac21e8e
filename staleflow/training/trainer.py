"""The trainer: gradients of a step's groups as they arrive, and one update when the last has come.

    trainer = Trainer(model, TrainerOptions(learning_rate=5e-4, max_staleness=2))
    trainer.feed(step=0, groups=[rows_of_one_group, ...])     # any number of times
    report = trainer.finish(step=0)                           # update; the model is version 1 now
    trainer.weights()                                         # to be pushed to the engines
    trainer.reset()                                           # forget what was fed: the step is fed again

Losses are kept as sums until the step is whole, so it does not matter in how many pieces it comes. What needs the whole
batch (``TrainerOptions.whole_batch``) is held until ``finish``. With several updates per step, what they start from is
measured first (values, and the proximal policy that corrections need), advantages are those of the whole step, and the
groups with a signal, in the order fed, are cut into as many mini-batches of as equal numbers as can be.

Before a group is used, the age of each token is checked: a trainer that is given something beyond the bound stops and
says which trajectory it was.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from staleflow.errors import RunError
from staleflow.training.adapters import adapters_off, merged_weights, prepare
from staleflow.training.attention import attend_by_rows, attends_by_rows, flash_shares
from staleflow.training.clock import clock_of
from staleflow.training.correction import Correction, difference
from staleflow.training.decoder import by_hand
from staleflow.training.gathering import gathers
from staleflow.training.losses import entropy_bonus, kl_loss, policy_loss, value_loss
from staleflow.training.micro_batches import Known, MicroBatch, Outputs, forward, micro_batches
from staleflow.training.optimiser import AdamW, HostedAdamW
from staleflow.training.options import CORRECTIONS, TrainerOptions
from staleflow.training.own import SPARED, check_correction, own_parts
from staleflow.training.packed import LossSum, Metrics, scale_gradients
from staleflow.training.pieces import Sizes
from staleflow.training.report import StepReport, metric_values
from staleflow.training.work import (
    GroupRows,
    StepWork,
    episodes_of,
    estimate_by_gae,
    of_episodes,
    shaped_rewards,
    signals,
    with_advantages,
)
from staleflow.types import GIVEN, Row, oldest

__all__ = ["GroupRows", "StalenessError", "StepReport", "Trainer", "TrainerOptions"]


class StalenessError(RunError):
    """A trajectory is older than the bound allows: a broken promise, not a bad setting."""


@dataclass(slots=True)
class _Open:
    """What was fed of the step that is being trained."""

    loss: LossSum
    metrics: Metrics = field(default_factory=Metrics)
    groups: list[GroupRows] = field(default_factory=list[GroupRows])
    token_staleness: Counter[int] = field(default_factory=Counter[int])
    trajectory_staleness: Counter[int] = field(default_factory=Counter[int])
    waiting: list[GroupRows] = field(default_factory=list[GroupRows])
    """Those whose gradients are not computed yet."""
    tokens: int = 0
    """That a pass with them would compute."""
    missing: int = 0
    """Groups of the step that were still to come when the last ones were fed."""
    without_signal: list[int] = field(default_factory=list[int])
    """Tokens of each group that teaches nothing."""
    norms: list[float] = field(default_factory=list[float])
    """Norms of the gradients of each update made."""


class ValueHead(nn.Module):
    """What a state is worth, for PPO: V = w h + b of its last hidden state, in float32 at least. It begins at 0, so
    that the first advantages are discounted rewards."""

    def __init__(self, hidden: int, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.linear = nn.Linear(hidden, 1, device=like.device, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        return self.linear(hidden_TH.to(self.linear.weight.dtype))[:, 0]


class Trainer:
    def __init__(self, model: Any, options: TrainerOptions, version: int = 0) -> None:
        """Takes the model over: it is given adapters and frozen as the options say, and is its own reference now."""
        self.model = model
        self.options = options
        self.version = version
        """Updates made so far; step ``version`` is the one that is being trained."""
        self.on_pass: Callable[[], None] = lambda: None
        """Called after every pass through the model: long work that moves."""
        attend_by_rows(model)
        apart = options.kl_coefficient > 0 and not options.lora_rank
        self.reference: Any = copy.deepcopy(model).requires_grad_(False).eval() if apart else None
        """A copy of the model as it was given; with adapters it is the model without them."""
        prepare(model, options)
        like = next(model.parameters())
        self.device: torch.device = like.device
        self.value_head = ValueHead(model.config.hidden_size, like) if options.has_values else None
        self._decoder = self._reference_decoder = None
        self._place()
        trained = [each for each in model.parameters() if each.requires_grad]
        parts: list[dict[str, Any]] = [{"params": trained, "peak": options.learning_rate}]
        if self.value_head is not None:
            rate = options.value_learning_rate or options.learning_rate
            parts.append({"params": list(self.value_head.parameters()), "peak": rate})
        kind = HostedAdamW if options.offload_moments else AdamW
        self.optimiser = kind(
            parts, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay, fused=True
        )
        self.optimiser.forget()
        self._policy_loss, self._aggregation = policy_loss(options)
        knobs = {"importance_cap": options.importance_cap, "sequence_band": options.sequence_band}
        correct = CORRECTIONS.bound(options.correction, knobs, options.correction_arguments)
        self._correct = CORRECTIONS.held(options.correction, correct, check_correction, SPARED)
        self._clock = clock_of(self.device)
        self._open = self._nothing()

    def _place(self) -> None:
        """Decide where and how passes are computed: on this device, on a GPU by hand if the model is such."""
        if self._half:
            self._decoder = by_hand(self.model, self.options.activation_checkpointing)
            self._reference_decoder = by_hand(self.reference) if self.reference is not None else None

    @property
    def _half(self) -> bool:
        """Whether matrix products are in bfloat16."""
        return self.options.autocast == "auto" and self.device.type == "cuda"

    @cached_property
    def _sharing(self) -> bool:
        """Whether rows may share their prompts."""
        if not self.options.share_prompts or not attends_by_rows(self.model):
            return False
        if self._half and not flash_shares(self.device):
            warnings.warn("attention over pieces is wrong on this GPU: prompts are not shared", stacklevel=2)
            return False
        return True

    @property
    def parameters(self) -> list[Tensor]:
        """All that are trained, the value head's last."""
        return self.optimiser.parameters

    def feed(self, step: int, groups: Sequence[GroupRows], missing: int = 0) -> None:
        """Accumulate these groups, all of whose members are there; ``advance`` says when. ``missing`` groups of the
        step are still to come."""
        if step != self.version:
            raise ValueError(
                f"groups of step {step} were fed while step {self.version} is trained: reset, then feed it"
            )
        rows = [row for group in groups for row in group]
        for row in rows:
            for version, count in row.spans:
                if version != GIVEN and not 0 <= step - version <= self.options.max_staleness:
                    raise StalenessError(
                        f"trajectory {row.name} has {count} tokens of version {version}, {step - version} steps old at "
                        f"step {step}; the bound is {self.options.max_staleness}"
                    )
        for row in rows:
            for version, count in row.spans:
                if version != GIVEN:
                    self._open.token_staleness[step - version] += count
            first = oldest(row.spans)
            self._open.trajectory_staleness[0 if first is None else step - first] += 1
        self._open.groups += groups
        if self.options.whole_batch is None:
            self._open.waiting += groups
            self._open.missing = missing
            waiting = [row for group in self._open.waiting for row in group]
            self._open.tokens = Sizes.of(waiting, self._sharing).total
            self.advance()

    @property
    def waiting(self) -> bool:
        """Whether there are groups whose gradients were not begun with."""
        return bool(self._open.waiting)

    @property
    def due(self) -> bool:
        """Whether groups wait for nothing but the device: call ``advance`` soon."""
        return self.waiting and not self._gathers

    @property
    def _gathers(self) -> bool:
        """Whether groups wait for others of their step."""
        now = self._open
        return self.options.shares_gpu and gathers(len(now.waiting), now.missing, now.tokens, self._full)

    @property
    def _full(self) -> int:
        """Tokens that fill a pass of every rank."""
        return self.options.micro_tokens * self.options.ranks

    def advance(self) -> None:
        """Begin with the groups that wait, if the device has nothing to do or they fill a pass.

        A GPU computes beside this process, so groups that come one by one gather meanwhile: a pass of few tokens would
        take as long as one of many.
        """
        if self.due and (self._open.tokens >= self._full or not self._clock.busy):
            self.flush()

    def flush(self) -> None:
        """Begin with all groups that wait."""
        groups, self._open.waiting, self._open.tokens = self._open.waiting, [], 0
        if groups:
            self.compute(groups)

    def compute(self, groups: Sequence[GroupRows]) -> None:
        """Add the gradients of these groups now, as if no others were in their step."""
        self._open.loss += self._accumulate(self._work(groups))

    def finish(self, step: int) -> StepReport:
        """Update with everything that was fed; the model is the next version. Without any signal it is the same."""
        done = self._open
        if step != self.version or not done.groups:
            raise ValueError(f"step {step} cannot be finished: step {self.version} has {len(done.groups)} groups")
        asked = time.perf_counter()
        self.flush()
        early_s = max(0.0, self._clock.seconds() - (time.perf_counter() - asked))
        if self.options.whole_batch is None:
            self._update(step, done.loss)
        else:
            for part in self._work(done.groups).split(self.options.updates_per_step):
                loss = self._accumulate(part)
                self._update(step, loss)
                done.loss += loss
        self.version += 1
        report = self._report(step, done, early_s)
        self.reset()
        return report

    def reset(self) -> None:
        """Forget what was fed since the last update, and what was made of the parameters for it."""
        self.optimiser.zero_grad(set_to_none=True)
        self._open = self._nothing()
        self._clock = clock_of(self.device)
        self._changed()

    def _changed(self) -> None:
        if self._decoder is not None:
            self._decoder.forget()

    def weights(self) -> dict[str, Tensor]:
        """The model under its Hugging Face names, adapters merged in: what engines are given.

        Where nothing had to be merged these are the trained tensors themselves, which the next update changes.
        """
        return merged_weights(self.model)

    def _nothing(self) -> _Open:
        return _Open(LossSum.zero(self._aggregation, self.device))

    # Before gradients

    def _work(self, groups: Sequence[GroupRows]) -> StepWork:
        work = StepWork(groups)
        if self.options.measures_first:
            work = StepWork(groups, self._measured(work.rows))
        work = of_episodes(with_advantages(work, self.options))
        teaching = signals(work)
        self._open.without_signal += [
            tokens for tokens, teaches in zip(work.tokens, teaching, strict=True) if not teaches
        ]
        return work.only(teaching) if self.options.skips else work

    @torch.no_grad()
    def _measured(self, rows: list[Row]) -> Known:
        """The policy and the values that the step begins with."""
        found = [self._forward(batch) for batch in self._passes(rows, Known())]
        values = [each.values_T for each in found if each.values_T is not None]
        return Known(
            proximal_T=torch.cat([each.logprobs_T for each in found]).cpu(),
            values_T=torch.cat(values).cpu() if values else None,
        )

    # Gradients

    def _accumulate(self, work: StepWork) -> LossSum:
        """Add to the gradients those of the sum of this work's losses."""
        total = LossSum.zero(self._aggregation, self.device)
        with self._clock:
            for batch in self._passes(work.rows, work.known):
                loss = self._loss(batch)
                loss.total.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
                self.on_pass()
        return total

    def _passes(self, rows: Sequence[Row], known: Known) -> Iterator[MicroBatch]:
        most = self.options.micro_tokens
        if self._decoder is not None and self._decoder.recordings is not None:
            recorded = self._decoder.recordings.most
            if Sizes.of(rows, self._sharing).total <= 2 * recorded:  # a larger one would be bound by launches
                most = min(most, recorded)
        return micro_batches(rows, most, self.device, known, share=self._sharing)

    def _loss(self, batch: MicroBatch) -> LossSum:
        options, segments = self.options, batch.segments
        out = self._forward(batch)
        now_T, first_T = out.logprobs_T.detach(), batch.known.proximal_T
        if first_T is not None or not self._open.norms:
            self._open.metrics += difference(now_T if first_T is None else first_T, batch.behaviour_T)
        self._open.metrics += Metrics({"policy_entropy": (out.entropy_T.detach().sum(), out.entropy_T.numel())})
        correction: Correction = self._correct(now_T if first_T is None else first_T, batch.behaviour_T, segments)
        advantages_T, value = self._advantages(out, batch, correction)
        loss = self._policy_loss(out.logprobs_T, advantages_T, segments, correction, self._aggregation)
        if value is not None:
            loss = loss.plus(value, options.value_coefficient)
        if options.entropy_coefficient:
            bonus = entropy_bonus(out.entropy_T, segments, self._aggregation, correction.keep_N)
            loss = loss.plus(bonus, options.entropy_coefficient)
        if options.kl_coefficient:
            reference_T = self._reference(batch)
            kl = kl_loss(out.logprobs_T, reference_T, segments, self._aggregation, correction.keep_N)
            loss = loss.plus(kl, options.kl_coefficient)
        return loss

    def _advantages(self, out: Outputs, batch: MicroBatch, correction: Correction) -> tuple[Tensor, LossSum | None]:
        """And with a value head its loss. Values that were not measured before are those of this very pass."""
        known, segments = batch.known, batch.segments
        if out.values_T is None:
            assert known.advantages_T is not None
            return known.advantages_T, None
        old_T = out.values_T.detach() if known.values_T is None else known.values_T
        estimate = estimate_by_gae(batch.rewards_N, old_T, segments, self.options)
        terms = (out.values_T, estimate.returns_T, old_T, segments, self._aggregation, correction.keep_N)
        advantages_T = estimate.advantages_T if known.advantages_T is None else known.advantages_T
        return advantages_T, value_loss(*terms, eps=self.options.value_clip)

    def _forward(self, batch: MicroBatch) -> Outputs:
        return forward(
            self.model,
            batch,
            self.options.temperature,
            train_entropy=self.options.entropy_coefficient > 0,
            value_head=self.value_head,
            half=self._half,
            decoder=self._decoder,
        )

    @torch.no_grad()
    def _reference(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the model before training."""
        how: dict[str, Any] = {"half": self._half, "decoder": self._reference_decoder}
        if self.reference is not None:
            return forward(self.reference, batch, self.options.temperature, **how).logprobs_T
        with adapters_off(self.model):
            return forward(self.model, batch, self.options.temperature, **how).logprobs_T

    # The update

    def _update(self, step: int, loss: LossSum) -> None:
        """With the gradients of this loss; none if nothing was left to train on, for momentum alone would move it."""
        if not loss.normaliser:
            self.optimiser.zero_grad(set_to_none=True)
            return
        scale_gradients(self.parameters, loss.scale)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip_norm))
        if not math.isfinite(norm):
            made = len(self._open.norms)
            self.reset()
            fix = f"{made} updates of it were made, so load the last checkpoint, and " if made else ""
            suspects = ", ".join(["its data", *own_parts(self.options)])
            raise FloatingPointError(
                f"the gradient of step {step} is not finite: {fix}lower the learning rate, or look at {suspects}"
            )
        for part in self.optimiser.param_groups:
            part["lr"] = part["peak"] * self.options.share(step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self._changed()
        self._open.norms.append(norm)

    def _report(self, step: int, done: _Open, early_s: float) -> StepReport:
        episodes = [rows for group in done.groups for rows in episodes_of(group)]
        rewards_N = torch.tensor([rows[0].reward for rows in episodes], dtype=torch.float64)
        lengths_N = torch.tensor([sum(row.made for row in rows) for rows in episodes])
        return StepReport(
            step=step,
            groups=len(done.groups),
            tokens=int(lengths_N.sum()),
            reward=float(rewards_N.mean()),
            shaped_reward=float(shaped_rewards(rewards_N, lengths_N, self.options).mean()),
            loss=float(done.loss.mean),
            gradient_norm=max(done.norms, default=0.0),
            learning_rate=self.options.rate(step),
            updates=len(done.norms),
            groups_without_signal=len(done.without_signal),
            tokens_without_signal=sum(done.without_signal),
            max_staleness=max(done.token_staleness, default=0),
            token_staleness=done.token_staleness,
            trajectory_staleness=done.trajectory_staleness,
            metrics=metric_values(done.loss.metrics + done.metrics),
            early_s=early_s,
        )
