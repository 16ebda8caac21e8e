"""The model runner: Llama, Mistral, Qwen2 and Qwen3 on a flat row of tokens, without padding.

One skeleton serves all four families. Projections that read the same input are fused into one matrix; ``parameters``
names the parts as Hugging Face does, as views, so that new weights are copied straight to their place. ::

    model = Model(read_config(folder), dtype=torch.float32)
    model.load(read_tensors(folder))
    logits_NV = model.forward(tokens_T, positions_T, attention, wanted_N)
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from staleflow.rollout.attention import Attention
from staleflow.rollout.engine import EngineError
from staleflow.rollout.model_folder import ModelConfig

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
LARGE = 1 << 18
"""Elements from which on oneDNN's matrix product is faster on CPU than the default in spite of its dearer call."""


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def choose_linear(weight: Tensor) -> Linear:
    """The fastest product for this matrix. In float32 on CPU, oneDNN gains 8 % on a model of 135 M parameters."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LARGE:
        try:
            onednn_linear(weight.new_zeros(1, weight.shape[1]), weight, None)
        except (AttributeError, RuntimeError):
            return functional.linear
        return onednn_linear
    return functional.linear


class Layer:
    """The tensors of one layer."""

    def __init__(self, config: ModelConfig, empty: Callable[..., Tensor]) -> None:
        _, heads, kv_heads, head_dim = config.geometry
        rows = (heads + 2 * kv_heads) * head_dim
        # In the order of a checkpoint, so that what was pushed as neighbours is pulled in one copy.
        self.qkv = empty(rows, config.hidden)
        self.qkv_bias = empty(rows) if config.qkv_bias else None
        self.out = empty(config.hidden, heads * head_dim)
        self.out_bias = empty(config.hidden) if config.out_bias else None
        self.query_norm = empty(head_dim) if config.qk_norm else None
        self.key_norm = empty(head_dim) if config.qk_norm else None
        self.gate_up = empty(2 * config.intermediate, config.hidden)
        self.gate_up_bias = empty(2 * config.intermediate) if config.mlp_bias else None
        self.down = empty(config.hidden, config.intermediate)
        self.down_bias = empty(config.hidden) if config.mlp_bias else None
        self.attention_norm = empty(config.hidden)
        self.mlp_norm = empty(config.hidden)
        self.times_qkv = choose_linear(self.qkv)
        self.times_out = choose_linear(self.out)
        self.times_gate_up = choose_linear(self.gate_up)
        self.times_down = choose_linear(self.down)

    def named(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        _, heads, kv_heads, head_dim = config.geometry
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        for kind, qkv, gate_up, out, down in (
            ("weight", self.qkv, self.gate_up, self.out, self.down),
            ("bias", self.qkv_bias, self.gate_up_bias, self.out_bias, self.down_bias),
        ):
            if qkv is not None:
                for part, view in zip("qkv", qkv.split(sizes), strict=True):
                    yield f"self_attn.{part}_proj.{kind}", view
            if out is not None:
                yield f"self_attn.o_proj.{kind}", out
            if gate_up is not None:
                for part, view in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                    yield f"mlp.{part}_proj.{kind}", view
            if down is not None:
                yield f"mlp.down_proj.{kind}", down
        yield "input_layernorm.weight", self.attention_norm
        yield "post_attention_layernorm.weight", self.mlp_norm
        if self.query_norm is not None and self.key_norm is not None:
            yield "self_attn.q_norm.weight", self.query_norm
            yield "self_attn.k_norm.weight", self.key_norm


class Model:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.config = config
        self.dtype = dtype

        flat = torch.zeros(elements(config), dtype=dtype, device=device)
        used = 0

        def empty(*shape: int) -> Tensor:
            nonlocal used
            begin, used = used, used + aligned(math.prod(shape))
            return flat[begin : begin + math.prod(shape)].view(shape)

        self.embedding = empty(config.vocabulary, config.hidden)
        self.layers = [Layer(config, empty) for _ in range(config.geometry.layers)]
        self.norm = empty(config.hidden)
        self.head = self.embedding if config.tied else empty(config.vocabulary, config.hidden)
        self.times_head = choose_linear(self.head)
        self.parameters = dict(self._named())
        """Hugging Face names to views of the tensors that the runner computes with."""
        self.turns = rotary(config, dtype, device)
        """Cosine and sine by position."""

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            for name, view in layer.named(self.config):
                yield f"model.layers.{index}.{name}", view
        yield "model.norm.weight", self.norm
        if not self.config.tied:
            yield "lm_head.weight", self.head

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        missing = set(self.parameters)
        for name, tensor in tensors:
            target = self.parameters.get(name)
            if target is None:
                if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tied):
                    continue
                raise EngineError(f"the checkpoint has a tensor {name} that its config.json does not provide for")
            if target.shape != tensor.shape:
                raise EngineError(
                    f"{name} has the shape {tuple(tensor.shape)} but config.json says {tuple(target.shape)}: "
                    "the two files belong to different models"
                )
            target.copy_(tensor)
            missing.discard(name)
        if missing:
            raise EngineError(f"the checkpoint lacks {len(missing)} tensors, the first is {min(missing)}")

    def randomise(self) -> None:
        """Weights of about the size that training starts from."""
        torch.manual_seed(0)
        for name, view in self.parameters.items():
            view.fill_(1.0) if "norm" in name else view.normal_(0.0, 0.02)

    def unsound(self) -> str | None:
        """The name of a tensor with a NaN or an infinity; None if there is none."""
        return next((name for name, view in self.parameters.items() if not torch.isfinite(view).all()), None)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None) -> Tensor:
        """Logits of the ``wanted`` tokens; of all if None."""
        config = self.config
        hidden, epsilon, wide = (config.hidden,), config.epsilon, config.intermediate
        _, heads, kv_heads, head_dim = config.geometry
        cos, sin = self.turns[0][positions], self.turns[1][positions]
        x = functional.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            y = functional.rms_norm(x, hidden, layer.attention_norm, epsilon)
            qkv = layer.times_qkv(y, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
            turned = qkv[:, : heads + kv_heads]
            if layer.query_norm is not None:
                turned = self._normed(layer, turned)
            turned = (turned * cos).addcmul_(turned.roll(head_dim // 2, 2), sin)
            qkv[:, heads : heads + kv_heads] = turned[:, heads:]
            y = attention.attend(index, turned[:, :heads], qkv[:, heads:])
            x = layer.times_out(y, layer.out, layer.out_bias).add_(x)
            y = functional.rms_norm(x, hidden, layer.mlp_norm, epsilon)
            y = layer.times_gate_up(y, layer.gate_up, layer.gate_up_bias)
            y = functional.silu(y[:, :wide]).mul_(y[:, wide:])
            x = layer.times_down(y, layer.down, layer.down_bias).add_(x)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return self.times_head(functional.rms_norm(x, hidden, self.norm, epsilon), self.head, None)

    def _normed(self, layer: Layer, qk: Tensor) -> Tensor:
        _, heads, _, head_dim = self.config.geometry
        epsilon = self.config.epsilon
        query = functional.rms_norm(qk[:, :heads], (head_dim,), layer.query_norm, epsilon)
        key = functional.rms_norm(qk[:, heads:], (head_dim,), layer.key_norm, epsilon)
        return torch.cat((query, key), 1)


def elements(config: ModelConfig) -> int:
    """Elements of all tensors together, in one buffer."""
    layers, heads, kv_heads, head_dim = config.geometry
    hidden, wide = config.hidden, config.intermediate
    rows = (heads + 2 * kv_heads) * head_dim
    layer = [rows * hidden, hidden * heads * head_dim, 2 * wide * hidden, hidden * wide, hidden, hidden]
    layer += [rows] * config.qkv_bias + [hidden] * config.out_bias + [2 * wide, hidden] * config.mlp_bias
    layer += [head_dim, head_dim] * config.qk_norm
    whole = [config.vocabulary * hidden] * (1 if config.tied else 2) + [hidden]
    return layers * sum(map(aligned, layer)) + sum(map(aligned, whole))


def aligned(count: int) -> int:
    """Elements to take for ``count``, so that the next tensor is aligned for wide loads."""
    return -(-count // 32) * 32


def rotary(config: ModelConfig, dtype: torch.dtype, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[positions, 1, head_dim]``; the sine's first half is negated, as rotation needs it."""
    source = config.source
    parameters = source.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        head_dim = config.geometry.head_dim
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, factor = 1.0 / parameters.get("rope_theta", 10_000.0) ** exponent, 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](source, torch.device("cpu"))
    angles = torch.arange(config.positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    return cos.to(device, dtype), sin.to(device, dtype)
