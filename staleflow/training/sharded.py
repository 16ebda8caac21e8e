"""A trainer whose model, gradients and moments are spread over several processes (FSDP2): what each of them runs.

    trainer = ShardedTrainer(read_model(folder), options, ranks)     # the same calls in the same order on every rank
    trainer.feed(step=0, groups=all_groups_of_the_step)
    trainer.finish(step=0)

Every rank is given all groups and decides alike about advantages, signals and mini-batches. Rows are then shared out by
what they cost, each rank computes its own, and every rank makes as many passes as the one that needs most: where
nothing is left it makes an empty one, whose gradient is 0, because a pass gathers the weights of a block from all ranks
and gives the gradients back to all. Losses are sums, so the update is that of one process, up to rounding.

A rank holds the rows of each matrix that FSDP gives it, in float32; on a GPU blocks are gathered in bfloat16 and
gradients summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from staleflow.training.adapters import ADAPTER, BASE, adapted, adapters_off
from staleflow.training.micro_batches import Known, MicroBatch, Outputs, forward, micro_batches
from staleflow.training.options import TrainerOptions
from staleflow.training.packed import LossSum, Metrics
from staleflow.training.pieces import Sizes, cuts, shared_out
from staleflow.training.ranks import Ranks
from staleflow.training.report import StepReport
from staleflow.training.trainer import Trainer, ValueHead, _Open  # pyright: ignore[reportPrivateUsage]
from staleflow.training.work import StepWork
from staleflow.types import Row

ATTENDING = 4
"""An operation of attention takes about as long as so many of a product, on an H200 with models of 0.5 B and 1.5 B
(docs/results/trainer.md: 10 and 15 % of a step for 512 keys a query beside products of 73 and 61 %)."""
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class Pass(nn.Module):
    """A pass as a module: what is outside of blocks is gathered at its beginning."""

    def __init__(self, model: Any, value_head: ValueHead | None = None) -> None:
        super().__init__()
        self.model = model
        self.value_head = value_head

    def forward(self, batch: MicroBatch, temperature: float, **how: Any) -> Outputs:
        found = forward(self.model, batch, temperature, value_head=self.value_head, **how)
        values_T = found.values_T.clone() if found.values_T is not None else None
        return Outputs(found.logprobs_T.clone(), found.entropy_T.clone(), values_T)  # FSDP wants no views


class ShardedTrainer(Trainer):
    def __init__(self, model: Any, options: TrainerOptions, ranks: Ranks, version: int = 0) -> None:
        self.ranks = ranks
        layer, config = model.get_decoder().layers[0], model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = size * config.num_attention_heads
        self._pairs = sum(each.numel() for each in layer.parameters()) / (2 * ATTENDING * width)
        """Of queries and keys, that cost as much as a token."""
        super().__init__(model, options, version)

    def _place(self) -> None:
        self.device = self.ranks.device
        self._pass = self._sharded(Pass(self.model, self.value_head))
        self._reference_pass = None if self.reference is None else self._sharded(Pass(self.reference))

    def _sharded(self, whole: Pass) -> Any:
        policy = HALF if self._half else MixedPrecisionPolicy()
        if whole.value_head is not None:
            fully_shard(whole.value_head.linear, mesh=self.ranks.mesh)  # in full precision always
        for block in whole.model.get_decoder().layers:
            fully_shard(block, mesh=self.ranks.mesh, mp_policy=policy)
        if self._half:  # the residual stays in float32
            whole.model.get_input_embeddings().register_forward_hook(lambda _module, _given, out: out.float())
        still = whole.model is self.reference  # it has no backward after which what was gathered is given back
        return fully_shard(whole, mesh=self.ranks.mesh, mp_policy=policy, reshard_after_forward=still)

    def advance(self) -> None:
        """When groups that wait are begun with is the first rank's decision: devices are not busy at the same time."""

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """As a trainer's, each tensor sharded by rows. All ranks call it: of an adapter, A is gathered."""
        parameters = dict(self.model.named_parameters())  # tied ones under their first name
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - parameters.keys()
        layers = {f"{name}.weight": layer for name, layer in adapted(self.model).items()}
        found: dict[str, Tensor] = {}
        for key, tensor in self.model.state_dict().items():
            if ADAPTER not in key and key not in tied:
                name = key.replace(BASE, ".")
                found[name] = _merged(tensor, layers[name]) if name in layers else tensor
        return found

    def _changed(self) -> None:
        self._pass.reshard()  # what was gathered for a pass without backward is old now

    # Shares of the work

    def _batches(self, rows: Sequence[Row], known: Known) -> tuple[Tensor, Iterator[MicroBatch | None]]:
        """Which of the rows' generated tokens are this rank's, and its passes; None: an empty one."""
        most = self.options.micro_tokens
        given = shared_out(rows, self.ranks.size, self._pairs, self._sharing)
        every = [Sizes.of([rows[at] for at in share], self._sharing) for share in given]
        passes = max(len([*cuts(sizes, most)]) for sizes in every)
        mine = given[self.ranks.rank]
        mine_N = torch.zeros(len(rows), dtype=torch.bool)
        mine_N[mine] = True
        made_N = torch.tensor([row.made for row in rows], dtype=torch.int64)  # there may be no rows
        mine_T = mine_N.repeat_interleave(made_N)

        def batches() -> Iterator[MicroBatch | None]:
            made = 0
            its = [rows[at] for at in mine]
            for made, batch in enumerate(  # noqa: B007 - counted
                micro_batches(its, most, self.device, known.at(mine_T), share=self._sharing), 1
            ):
                yield batch
            yield from [None] * (passes - made)

        return mine_T, batches()

    def _nothing_of(self, known: Known) -> MicroBatch:
        """One row that teaches nothing, of which as much is known as of the others."""
        row = Row.of("", [0], [0], [0.0], ((self.version, 1),), 0.0)
        blank = Known(*(None if each is None else torch.zeros(1, dtype=each.dtype) for each in known))
        return next(micro_batches([row], 1, self.device, blank._replace(wholes_T=None)))

    @torch.no_grad()
    def _measured(self, rows: list[Row]) -> Known:
        mine_T, batches = self._batches(rows, Known())
        found = [(batch is None, self._forward(batch or self._nothing_of(Known()))) for batch in batches]
        computed = [out for empty, out in found if not empty]

        def whole(parts: list[Tensor]) -> Tensor:
            """Of all ranks: each adds its own to zeros."""
            kind = found[0][1].logprobs_T.dtype
            all_T = torch.zeros(mine_T.numel(), dtype=kind)
            all_T[mine_T] = torch.cat([part.cpu().to(kind) for part in parts]) if parts else all_T[mine_T]
            return self.ranks.sum(all_T)

        proximal_T = whole([out.logprobs_T for out in computed])
        values = [out.values_T for out in computed if out.values_T is not None]
        return Known(proximal_T=proximal_T, values_T=whole(values) if self.value_head is not None else None)

    def _accumulate(self, work: StepWork) -> LossSum:
        """The gradients of all ranks' work, and the loss of this one's."""
        total = LossSum.zero(self._aggregation, self.device)
        if not work.groups:
            return total
        _, batches = self._batches(work.rows, work.known)
        with self._clock:
            for batch in batches:
                seen = self._open.metrics
                loss = self._loss(batch or self._nothing_of(work.known))
                weight = self.ranks.size if batch is not None else 0  # FSDP divides by the number of ranks
                (loss.total * weight).backward()
                if batch is not None:
                    total += loss.detach()
                else:
                    self._open.metrics = seen
                self.on_pass()
        return total

    def _forward(self, batch: MicroBatch) -> Outputs:
        entropic = self.options.entropy_coefficient > 0
        return self._pass(batch, self.options.temperature, train_entropy=entropic, half=self._half)

    @torch.no_grad()
    def _reference(self, batch: MicroBatch) -> Tensor:
        if self._reference_pass is not None:
            return self._reference_pass(batch, self.options.temperature, half=self._half).logprobs_T
        with adapters_off(self.model):
            return self._pass(batch, self.options.temperature, half=self._half).logprobs_T

    # What belongs to all ranks

    def _update(self, step: int, loss: LossSum) -> None:
        counts = self.ranks.gather((loss.tokens, loss.sequences))
        tokens, sequences = (sum(each) for each in zip(*counts, strict=True))
        super()._update(step, replace(loss, tokens=tokens, sequences=sequences))

    def _report(self, step: int, done: _Open, early_s: float) -> StepReport:
        done.loss, done.metrics = self._of_all(done.loss), self._metrics_of_all(done.metrics)
        return super()._report(step, done, early_s)

    def _of_all(self, mine: LossSum) -> LossSum:
        every = self.ranks.gather((float(mine.total), mine.tokens, mine.sequences))
        total, tokens, sequences = (sum(each) for each in zip(*every, strict=True))
        metrics = self._metrics_of_all(mine.metrics)
        return LossSum(torch.tensor(total), tokens, sequences, self._aggregation, metrics)

    def _metrics_of_all(self, mine: Metrics) -> Metrics:
        sums = {name: (float(total), float(weight)) for name, (total, weight) in mine.sums.items()}
        peaks = {name: float(peak) for name, peak in mine.peaks.items()}
        found = Metrics()
        for its_sums, its_peaks in self.ranks.gather((sums, peaks)):
            found += Metrics(
                {name: (torch.tensor(total).double(), weight) for name, (total, weight) in its_sums.items()},
                {name: torch.tensor(peak).double() for name, peak in its_peaks.items()},
            )
        return found


def _merged(weight: Any, layer: Any) -> Tensor:
    """The rank's own rows of W + (alpha / rank) B A."""
    left, right = layer.lora_B["default"].weight.to_local(), layer.lora_A["default"].weight.full_tensor()
    rows = weight.to_local() + (left @ right) * layer.scaling["default"]
    return DTensor.from_local(rows, weight.device_mesh, (Shard(0),), shape=weight.shape, stride=weight.stride())
