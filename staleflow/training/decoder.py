"""The decoder of a model by hand: one pass over packed rows and its gradient, in few and large kernels.

    decoder = Decoder(model, kernels)
    hidden_TH = decoder(batch)                # one node of autograd: backward adds to ``.grad`` of the parameters
    decoder.forget()                          # the parameters have changed

transformers' modules cost some fifty launches a layer, and twice as many in backward, and keep what could be computed
again for nothing. Here matrices that read the same input are one, gradients of matrices are summed in float32 by the
product itself, and a layer keeps, for each token, its two normed inputs, keys, queries and values, the result of
attention, and both halves of the gate: 49 KB at 1.5 B. The residual and all that is summed up stay in float32; the
products read bfloat16.

What a family needs beyond this skeleton (norms of queries and keys, other activations, adapters) is left to
transformers: ``fits`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from staleflow.training.attention import HEAD, attends_by_rows
from staleflow.training.micro_batches import MicroBatch
from staleflow.training.pieces import Pieces

if TYPE_CHECKING:
    from staleflow.training.recorded import Recordings

FAMILIES = ("llama", "mistral", "qwen2")


def fits(model: Any) -> bool:
    """Whether the model is nothing but what is computed here."""
    config = model.config
    plain = config.model_type in FAMILIES and config.hidden_act == "silu" and attends_by_rows(model)
    plain = plain and model.get_decoder().layers[0].self_attn.head_dim % HEAD == 0
    biased = getattr(config, "mlp_bias", False) or any(".o_proj.bias" in name for name, _ in model.named_parameters())
    adapted = any(".lora_" in name for name, _ in model.named_parameters())
    return plain and not biased and not adapted


def by_hand(model: Any, recompute: bool = False) -> Decoder | None:
    """The decoder for a GPU, if the model is such."""
    if not fits(model):
        return None
    from staleflow.training import kernels
    from staleflow.training.recorded import Recordings

    decoder = Decoder(model, kernels, recompute=recompute)
    decoder.recordings = None if recompute else Recordings(decoder)
    return decoder


class Matrix:
    """Parameters one below the other: as the products read them, and the gradient that ``.grad`` is a view of."""

    def __init__(self, parameters: Sequence[Any], kind: torch.dtype) -> None:
        self.parameters = list(parameters)
        first, sizes = self.parameters[0], [each.shape[0] for each in self.parameters]
        shape = (sum(sizes), *first.shape[1:])
        self.value = torch.empty(shape, dtype=kind, device=first.device)
        self.values = list(self.value.split(sizes))
        self._shape, self._sizes = shape, sizes

    @cached_property
    def gradient(self) -> Tensor:
        first = self.parameters[0]
        return torch.empty(self._shape, dtype=first.dtype, device=first.device)

    @property
    def trained_gradient(self) -> Tensor | None:
        """None if the first of the parameters is frozen."""
        return self.gradient if self.parameters[0].requires_grad and torch.is_grad_enabled() else None

    @cached_property
    def gradients(self) -> list[Tensor]:
        parts = self.gradient.split(self._sizes)
        return [part.view_as(each) for part, each in zip(parts, self.parameters, strict=True)]


class Places(NamedTuple):
    """What a pass reads, and how its rows lie."""

    tokens_L: Tensor
    positions_L: Tensor
    predicting_T: Tensor
    pieces: Pieces

    @classmethod
    def of(cls, batch: MicroBatch) -> Places:
        return cls(batch.tokens_L, batch.positions_L, batch.predicting_T, batch.pieces)


class Turns(NamedTuple):
    """Angles by position, and how the rows of a pass lie."""

    cos_LD: Tensor
    sin_LD: Tensor
    pieces: Pieces


class Kept(NamedTuple):
    """What backward needs of a layer."""

    scaled: Tensor
    scales: Tensor
    qkv: Tensor
    attended: Tensor
    sums: Any
    scaled_mlp: Tensor
    scales_mlp: Tensor
    both: Tensor


class Layer:
    def __init__(self, layer: Any, config: Any, kind: torch.dtype, kernels: ModuleType) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = Matrix([each.weight for each in projections], kind)
        biased = projections[0].bias is not None
        self.bias = Matrix([each.bias for each in projections], kind) if biased else None
        self.out = Matrix([attention.o_proj.weight], kind)
        self.gate_up = Matrix([mlp.gate_proj.weight, mlp.up_proj.weight], kind)
        self.down = Matrix([mlp.down_proj.weight], kind)
        self.norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        self.heads, self.size = config.num_attention_heads, attention.head_dim
        self.every = self.heads + 2 * config.num_key_value_heads
        self.scale, self.epsilon, self.kind = attention.scaling, config.rms_norm_eps, kind
        self.kernels = kernels

    def matrices(self) -> Iterator[Matrix]:
        yield from (self.qkv, self.out, self.gate_up, self.down)
        if self.bias is not None:
            yield self.bias

    def forward(self, residual_LH: Tensor, branch_LH: Tensor | None, turns: Turns) -> tuple[Tensor, Kept]:
        """Adds to the residual in place what came before; returns what comes next, and is not yet added."""
        do = self.kernels
        normed, scaled, scales = do.add_norm(residual_LH, branch_LH, self.norms[0], self.epsilon, self.kind)
        bias = None if self.bias is None else self.bias.value
        qkv = linear(normed, self.qkv.value, bias).view(-1, self.every, self.size)
        do.rotate(qkv, turns.cos_LD, turns.sin_LD, (self.heads + self.every) // 2)
        attended, sums = do.attend(qkv, self.heads, turns.pieces, self.scale)
        branch = attended.flatten(1) @ self.out.value.t()
        before = (scaled, scales, qkv, attended, sums)
        normed, scaled, scales = do.add_norm(residual_LH, branch, self.norms[1], self.epsilon, self.kind)
        both = normed @ self.gate_up.value.t()
        return do.swiglu(both) @ self.down.value.t(), Kept(*before, scaled, scales, both)

    def backward(self, kept: Kept, d_residual_LH: Tensor, d_half_LH: Tensor, turns: Turns, parts: Tensor) -> Tensor:
        """Adds to the gradient of the residual in place; returns it in the precision of the pass."""
        do = self.kernels
        d_gated = d_half_LH @ self.down.value
        do.swiglu_backward(kept.both, d_gated)
        gated, d_both = d_gated, kept.both
        do.accumulate(self.down.gradient, d_half_LH, gated)
        del d_gated, gated
        d_normed = d_both @ self.gate_up.value
        norm = (kept.scaled_mlp, kept.scales_mlp, self.norms[1], d_residual_LH, parts[1])
        _, d_half, normed = do.norm_backward(d_normed, *norm)
        do.accumulate(self.gate_up.gradient, d_both, normed)
        d_attended = (d_half @ self.out.value).view_as(kept.attended)
        do.accumulate(self.out.gradient, d_half, kept.attended.flatten(1))
        d_states = do.attend_backward(d_attended, kept.qkv, kept.attended, kept.sums, turns.pieces, self.scale)
        d_qkv = do.rotate_back(*d_states, turns.cos_LD, turns.sin_LD).flatten(1)
        d_normed = d_qkv @ self.qkv.value
        norm = (kept.scaled, kept.scales, self.norms[0], d_residual_LH, parts[0])
        _, d_half, normed = do.norm_backward(d_normed, *norm)
        do.accumulate(self.qkv.gradient, d_qkv, normed)
        if self.bias is not None:
            self.bias.gradient += d_qkv.sum(0, dtype=self.bias.gradient.dtype)
        return d_half


class Decoder:
    def __init__(
        self, model: Any, kernels: ModuleType, kind: torch.dtype = torch.bfloat16, recompute: bool = False
    ) -> None:
        """``kind``: what the products read. ``recompute``: keep the residual before each layer and nothing else."""
        decoder, config = model.get_decoder(), model.config
        self.kernels, self.kind, self.recompute = kernels, kind, recompute
        self.layers = [Layer(each, config, kind, kernels) for each in decoder.layers]
        self.embedding = Matrix([decoder.embed_tokens.weight], kind)
        tied = model.get_output_embeddings().weight is decoder.embed_tokens.weight
        self.head = self.embedding if tied else Matrix([model.get_output_embeddings().weight], kind)
        norms = [norm for layer in self.layers for norm in layer.norms] + [decoder.norm.weight]
        self.norms = Matrix([norm[None] for norm in norms], norms[0].dtype)
        self.norms.parameters = norms
        self._rotary, self._epsilon = decoder.rotary_emb, config.rms_norm_eps
        self._matrices = [matrix for layer in self.layers for matrix in layer.matrices()]
        self._matrices += [self.embedding] if tied else [self.embedding, self.head]
        self.recordings: Recordings | None = None
        """Recordings of small passes, on a device that has them."""
        self._fresh = False
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def kept_bytes(self) -> int:
        """Bytes that one token takes until backward."""
        layer = self.layers[0]
        columns = layer.qkv.value.shape[1] + layer.down.value.shape[0] + layer.out.value.shape[1]
        columns += layer.qkv.value.shape[0] + layer.gate_up.value.shape[0]
        return len(self.layers) * columns * self.kind.itemsize

    def forget(self) -> None:
        """The parameters have changed: what the products read is made from them again."""
        self._fresh = False

    def __call__(self, batch: MicroBatch) -> Tensor:
        """The normed states before each generated token."""
        if not self._fresh:
            self._refresh()
        if not torch.is_grad_enabled():
            return self.forward(Places.of(batch), keep=False)[0]
        self._attach()
        return _Pass.apply(self._anchor, self, batch)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def _refresh(self) -> None:
        pairs = [pair for each in self._matrices for pair in zip(each.values, each.parameters, strict=True)]
        cast(Any, torch)._foreach_copy_([value for value, _ in pairs], [parameter for _, parameter in pairs])
        self._fresh = True

    def _attach(self) -> None:
        """Let gradients begin at 0 where there are none."""
        every = [*self._matrices, self.norms]
        trained = [
            (parameter, gradient)
            for each in every
            for parameter, gradient in zip(each.parameters, each.gradients, strict=True)
            if parameter.requires_grad
        ]
        if trained[0][0].grad is None:
            cast(Any, torch)._foreach_zero_([each.gradient for each in every])
            for parameter, gradient in trained:
                parameter.grad = gradient

    def forward(self, places: Places, keep: bool) -> tuple[Tensor, Any]:
        residual = embedding(places.tokens_L, self.embedding.parameters[0])
        turns = self._turns(places, residual)
        branch: Tensor | None = None
        kept: list[Any] = []
        for layer in self.layers:
            if keep and self.recompute:
                residual = residual if branch is None else residual.add_(branch)
                kept.append(residual.clone())
                branch, _ = layer.forward(residual, None, turns)
            else:
                branch, found = layer.forward(residual, branch, turns)
                if keep:
                    kept.append(found)
                del found
        last = residual[places.predicting_T]
        before = None if branch is None else branch[places.predicting_T]
        normed, *scaled = self.kernels.add_norm(last, before, self.norms.parameters[-1], self._epsilon, self.kind)
        return normed, (kept, turns, *scaled)

    def backward(self, places: Places, found: Any, d_hidden_TH: Tensor) -> None:
        kept, turns, scaled, scales = found
        rows, size = places.tokens_L.numel(), d_hidden_TH.shape[1]
        parts = self.norms.gradient.new_empty(len(self.norms.parameters), min(rows, self.kernels.PROGRAMS), size)
        norm = (scaled, scales, self.norms.parameters[-1], None, parts[-1])
        d_last, d_last_half, _ = self.kernels.norm_backward(d_hidden_TH, *norm)
        d_residual = d_last.new_zeros(rows, size).index_copy_(0, places.predicting_T, d_last)
        d_half = d_last_half.new_zeros(rows, size).index_copy_(0, places.predicting_T, d_last_half)
        for at in reversed(range(len(self.layers))):
            layer, held = self.layers[at], kept.pop()
            if self.recompute:
                _, held = layer.forward(held, None, turns)
            d_half = layer.backward(held, d_residual, d_half, turns, parts[2 * at : 2 * at + 2])
            del held
        self.norms.gradient += parts.sum(1)
        self.embedding.gradient.index_add_(0, places.tokens_L, d_residual)

    def _turns(self, places: Places, like: Tensor) -> Turns:
        half = self.layers[0].size // 2
        cos, sin = (each[0, :, :half].contiguous() for each in self._rotary(like, places.positions_L[None]))
        return Turns(cos, sin, places.pieces)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, decoder: Decoder, batch: MicroBatch) -> Tensor:  # noqa: ARG004
        recording = decoder.recordings.find(batch) if decoder.recordings is not None else None
        if recording is not None:
            ctx.backward_pass = recording.backward
            return recording.forward(batch)
        places = Places.of(batch)
        hidden_TH, kept = decoder.forward(places, keep=True)
        ctx.backward_pass = lambda d_hidden_TH: decoder.backward(places, kept, d_hidden_TH)
        return hidden_TH

    @staticmethod
    def backward(ctx: Any, d_hidden_TH: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.backward_pass(d_hidden_TH.contiguous())
        return None, None, None
