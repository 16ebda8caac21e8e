"""The pass by hand has the outputs and the gradients of the same model in transformers' modules."""

import copy
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from staleflow.servers.payloads import Row
from staleflow.training.attention import attend_by_rows
from staleflow.training.decoder import Decoder, fits
from staleflow.training.logprobs import log_probs
from staleflow.training.micro_batches import MicroBatch, Outputs, forward, micro_batches
from staleflow.training.pieces import Context, Pieces, Sizes, cuts
from staleflow.training.trainer import Trainer, TrainerOptions
from tests.training import plain_kernels
from tests.training.batches import quick
from tests.training.test_trainer import groups_of

VOCABULARY = 12
NEAR = 1e-6
"""transformers computes norms and angles in float32, whatever the model is in."""
SHAPE: dict[str, Any] = {"intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": VOCABULARY}


def model_of(family: str, tied: bool, seed: int = 0, hidden: int = 16) -> Any:
    torch.manual_seed(seed)
    heads = {"hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    made: dict[str, Any] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, **heads)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **heads)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, **heads, head_dim=hidden // 4)),
    }
    model = made[family]().double()
    for each in model.parameters():
        if each.ndim == 1:  # norms of 1 and biases of 0 hide mistakes
            each.data += 0.3 * torch.randn(each.shape, dtype=each.dtype)
    attend_by_rows(model)
    return model


def batch_of(lengths: list[tuple[int, int]], seed: int = 0) -> MicroBatch:
    random = np.random.default_rng(seed)

    def row(prompt: int, size: int) -> Row:
        begun, tokens = (random.integers(0, VOCABULARY, count).astype("<i4") for count in (prompt, size))
        return Row.of("p0/0", begun, tokens, np.zeros(size, "<f4"), ((0, size),), 0.0)

    return next(micro_batches([row(*each) for each in lengths], 10**9))


def objective(found: Outputs, before: int = 0) -> torch.Tensor:
    """Something in which every output has a gradient of its own. ``before``: outputs of earlier passes."""
    at = torch.arange(before + 1, before + found.logprobs_T.numel() + 1).to(found.logprobs_T)
    return (found.logprobs_T * at.sin()).sum() + (found.entropy_T * at.cos()).sum()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def by_hand(model: Any, kernels: ModuleType = plain_kernels, **how: Any) -> Decoder:
    return Decoder(model, kernels, torch.float64, **how)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@quick(12)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    temperature=st.sampled_from([1.0, 0.7]),
    recompute=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_are_those_of_the_modules(
    family: str, tied: bool, lengths: list[tuple[int, int]], temperature: float, recompute: bool, seed: int
) -> None:
    plain = model_of(family, tied, seed)
    model, batch = copy.deepcopy(plain), batch_of(lengths, seed)
    decoder = by_hand(model, recompute=recompute)
    expected = forward(plain, batch, temperature, train_entropy=True)
    found = forward(model, batch, temperature, train_entropy=True, decoder=decoder)
    assert torch.allclose(found.logprobs_T, expected.logprobs_T, atol=NEAR)
    assert torch.allclose(found.entropy_T, expected.entropy_T, atol=NEAR)
    for _ in range(2):  # the second pass adds to the first
        objective(forward(plain, batch, temperature, train_entropy=True)).backward()
        objective(forward(model, batch, temperature, train_entropy=True, decoder=decoder)).backward()
    wanted, made = gradients(plain), gradients(model)
    assert wanted.keys() == made.keys()
    assert [name for name in wanted if (made[name] - wanted[name]).norm() > NEAR * (1 + wanted[name].norm())] == []


def test_logits_in_many_chunks_are_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, found = batch_of([(3, 6), (2, 5), (1, 1)]), []
    for chunk in (1 << 30, 5 * VOCABULARY * 8, 1):
        monkeypatch.setattr("staleflow.training.logprobs.CHUNK", chunk)
        model = model_of("llama", tied=True)
        out = forward(model, batch, 0.9, train_entropy=True, decoder=by_hand(model))
        objective(out).backward()
        found.append((out.logprobs_T.detach(), *gradients(model).values()))
    for other in found[1:]:
        assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(found[0], other, strict=True))


class Logits(TorchDispatchMode):
    """How many of their chunks were made."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made += func is torch.ops.aten.mm.default and found.shape[1] == VOCABULARY
        return found


@pytest.mark.parametrize(("chunks", "made"), [(1, 1), (2, 3), (7, 13)])
def test_the_last_logits_of_a_pass_are_made_once(chunks: int, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = torch.randn(7, 5).double().requires_grad_(), torch.randn(VOCABULARY, 5).double()
    monkeypatch.setattr("staleflow.training.logprobs.CHUNK", -(-7 // chunks) * VOCABULARY * 8)
    with Logits() as logits:
        found = Outputs(*log_probs(hidden, head, None, torch.arange(7), 0.7, True, plain_kernels))
        objective(found).backward()
    assert logits.made == made


def test_an_output_matrix_without_a_gradient_of_its_own_gets_it_from_autograd() -> None:
    """As one that was gathered from ranks: nothing is added to it behind their backs."""
    torch.manual_seed(0)
    hidden, head = torch.randn(7, 5).double().requires_grad_(), torch.randn(11, 5).double().requires_grad_()
    targets = torch.arange(7)
    found = Outputs(*log_probs(hidden, head, None, targets, 0.7, True, plain_kernels))
    gradients = torch.autograd.grad(objective(found), (hidden, head))
    every = torch.log_softmax(hidden @ head.t() / 0.7, -1)
    expected = Outputs(every[targets, targets], -(every.exp() * every).sum(-1))
    for one, other in zip(gradients, torch.autograd.grad(objective(expected), (hidden, head)), strict=True):
        assert torch.allclose(one, other, atol=NEAR)


def test_a_pass_without_gradients_leaves_them_alone_and_reads_what_was_changed() -> None:
    model, batch = model_of("qwen2", tied=True), batch_of([(3, 4), (1, 2)])
    decoder = by_hand(model)
    with torch.no_grad():
        forward(model, batch, 1.0, decoder=decoder)
        assert not gradients(model)
        for each in model.parameters():
            each.mul_(1.1)
        decoder.forget()
        found = forward(model, batch, 1.0, decoder=decoder).logprobs_T
        assert torch.allclose(found, forward(model, batch, 1.0).logprobs_T, atol=NEAR)


def test_frozen_parameters_get_no_gradient() -> None:
    plain, batch = model_of("llama", tied=False), batch_of([(3, 4), (1, 2)])
    for name, each in plain.named_parameters():
        each.requires_grad_("layers.1" in name and "k_proj" not in name)
    model = copy.deepcopy(plain)
    forward(plain, batch, 1.0).logprobs_T.sum().backward()
    forward(model, batch, 1.0, decoder=by_hand(model)).logprobs_T.sum().backward()
    wanted, made = gradients(plain), gradients(model)
    assert wanted.keys() == made.keys()
    assert all(torch.allclose(made[name], wanted[name], atol=NEAR) for name in wanted)


def test_what_is_not_plain_is_left_to_transformers() -> None:
    assert fits(model_of("llama", tied=True, hidden=32))
    assert not fits(model_of("llama", tied=True, hidden=16)), "heads of 4"
    assert not fits(model_of("qwen3", tied=True, hidden=32))
    biased = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_size=32, num_attention_heads=4, attention_bias=True))
    other = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_size=32, num_attention_heads=4, hidden_act="gelu"))
    for model in (biased, other):
        attend_by_rows(model)
        assert not fits(model)


@quick(100)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), most=st.integers(1, 80))
def test_passes_are_as_few_as_can_be_and_none_is_larger_than_need_be(sizes: list[int], most: int) -> None:
    ends = list(cuts(Sizes(sizes, [0] * len(sizes)), most))
    begins = [0, *ends[:-1]]
    held = [sum(sizes[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    assert sum(held) == sum(sizes)
    assert all(held)
    alone = [end - begin == 1 for begin, end in zip(begins, ends, strict=True)]
    assert all(size <= most or single for size, single in zip(held, alone, strict=True))
    least, room = 0, 0
    for size in sizes:
        least, room = (least, room - size) if size <= room else (least + 1, most - size)
    assert len(ends) == least


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_in_bfloat16_on_a_gpu_are_as_near_to_float64_as_those_of_the_modules(family: str) -> None:
    from staleflow.training import kernels

    exact = model_of(family, tied=True, hidden=64)
    batch = batch_of([(3, 40), (7, 90), (1, 1), (20, 300)])
    objective(forward(exact, batch, 0.8, train_entropy=True)).backward()
    wanted, there = gradients(exact), micro_batch_on_gpu(batch)
    plain, model = (copy.deepcopy(exact).float().cuda() for _ in range(2))
    decoder = Decoder(model, kernels) if fits(model) else None
    for each, how in ((plain, None), (model, decoder)):
        each.zero_grad()
        objective(forward(each, there, 0.8, train_entropy=True, half=True, decoder=how)).backward()
    far, near = (
        {name: float((gradient.cpu() - wanted[name]).norm()) for name, gradient in gradients(each).items()}
        for each in (plain, model)
    )
    assert far.keys() == near.keys() == wanted.keys()
    assert [name for name in near if near[name] > 1.5 * far[name] + 2e-2 * wanted[name].norm()] == []
    whole = float(sum(each.square().sum() for each in wanted.values())) ** 0.5
    assert sum(each**2 for each in near.values()) ** 0.5 < 2e-2 * whole


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"advantage": "gae", "entropy_coefficient": 0.01},
        {"kl_coefficient": 0.1, "micro_tokens": 16},
        {"updates_per_step": 2, "correction": "decoupled"},
        {"train_only": ("model.layers.1.*", "lm_head.*")},
    ],
    ids=["plain", "values", "reference", "two-updates", "frozen"],
)
def test_a_trainer_makes_the_same_updates_by_hand(more: dict[str, Any]) -> None:
    options, base = TrainerOptions(1, learning_rate=1e-2, **more), model_of("llama", tied=False)
    plain, made = (Trainer(copy.deepcopy(base), options) for _ in range(2))
    made._decoder = by_hand(made.model)
    for step in range(3):
        for trainer in (plain, made):
            trainer.feed(step, groups_of(4, 3, seed=step, version=step))
            report = trainer.finish(step)
            assert report.updates == options.updates_per_step
    for one, other in zip(plain.parameters, made.parameters, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def micro_batch_on_gpu(batch: MicroBatch) -> MicroBatch:
    def there(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cuda()
        whole = isinstance(value, (MicroBatch, Pieces, Context))
        return value._replace(**{name: there(each) for name, each in value._asdict().items()}) if whole else value

    return there(batch)
