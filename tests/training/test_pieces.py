"""Rows that share their prompt have the outputs and the gradients of rows that do not, and take fewer tokens."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.training import attention
from staleflow.training import trainer as trainer_module
from staleflow.training.attention import flash_shares
from staleflow.training.decoder import Decoder
from staleflow.training.micro_batches import MicroBatch, forward, micro_batches
from staleflow.training.pieces import Layout, Pieces, Sizes, cuts, shared_out
from staleflow.training.trainer import GroupRows, Trainer, TrainerOptions
from staleflow.types import GIVEN, Row
from tests.training import plain_kernels
from tests.training.batches import quick
from tests.training.test_decoder import NEAR, VOCABULARY, gradients, model_of, objective

Shape = tuple[int, list[int]]
"""Of a group: tokens of its prompt, and of each response."""
shapes = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 7), min_size=1, max_size=5)), min_size=1, max_size=4
)


def groups_of(given: list[Shape], seed: int = 0, version: int = 0, told: bool = False) -> list[GroupRows]:
    """``told``: some tokens inside of responses are given, as the results of tools are."""
    random = np.random.default_rng(seed)

    def row(name: str, prompt: Any, size: int) -> Row:
        spans = [(version, size)] if size < 3 or not told else [(version, 1), (GIVEN, 1), (version, size - 2)]
        tokens, drawn = random.integers(0, VOCABULARY, size), np.log(random.uniform(0.05, 0.12, size))
        return Row.of(name, prompt, tokens, drawn, spans, float(name[-1] in "02468"))

    found: list[GroupRows] = []
    for at, (prompt, sizes) in enumerate(given):
        begun = random.integers(0, VOCABULARY, prompt)
        found.append([row(f"p{at}/{member}", begun, size) for member, size in enumerate(sizes)])
    return found


def rows_of(given: list[Shape], seed: int = 0, told: bool = False) -> list[Row]:
    return [row for group in groups_of(given, seed, told=told) for row in group]


def passes(rows: list[Row], most: int, *, share: bool) -> list[MicroBatch]:
    return [*micro_batches(rows, most, share=share)]


@pytest.mark.parametrize(
    ("family", "by_hand"), [("llama", False), ("qwen3", False), ("llama", True), ("qwen2", True)], ids=str
)
@quick(15)
@given(shape=shapes, most=st.integers(1, 80), told=st.booleans(), seed=st.integers(0, 99))
def test_outputs_and_gradients_are_those_of_whole_rows(
    family: str, by_hand: bool, shape: list[Shape], most: int, told: bool, seed: int
) -> None:
    rows = rows_of(shape, seed, told)
    found: list[Any] = []
    for share in (False, True):
        model = model_of(family, tied=True, seed=seed)
        decoder = Decoder(model, plain_kernels, torch.float64) if by_hand else None
        outs: list[torch.Tensor] = []
        for batch in passes(rows, most, share=share):
            out = forward(model, batch, 0.9, train_entropy=True, decoder=decoder)
            objective(out, sum(each.shape[1] for each in outs)).backward()
            outs.append(torch.stack((out.logprobs_T, out.entropy_T)).detach())
        found.append((torch.cat(outs, 1), gradients(model)))
    (whole, wanted), (shared, made) = found
    assert torch.allclose(whole, shared, atol=NEAR)
    assert [name for name in wanted if (made[name] - wanted[name]).norm() > NEAR * (1 + wanted[name].norm())] == []


def test_a_group_takes_its_prompt_once() -> None:
    (batch,) = passes(rows_of([(10, [3, 1, 5]), (4, [2])]), 1000, share=True)
    assert batch.pieces.lengths == [9, 1 + 3, 1 + 1, 1 + 5, 4 + 2]
    assert batch.tokens_L.numel() == 9 + 3 + 9 + 6
    assert batch.pieces.context is not None
    assert batch.pieces.context.before == [0, 9, 9, 9, 0]
    (whole,) = passes(rows_of([(10, [3, 1, 5]), (4, [2])]), 1000, share=False)
    assert whole.pieces.lengths == [13, 11, 15, 6]
    assert whole.pieces.context is None


def kept(model: Any, batch: MicroBatch) -> tuple[int, torch.Tensor]:
    """Bytes that a pass keeps for its gradients, besides the model, and the loss."""
    found = {each.untyped_storage().data_ptr(): 0 for each in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = objective(forward(model, batch, 0.9))
        return sum(found.values()), loss


@quick(15)
@given(prompt=st.integers(40, 80), members=st.integers(20, 60), recomputed=st.booleans())
def test_many_short_responses_to_a_long_prompt_keep_no_more_for_a_token_than_whole_rows(
    prompt: int, members: int, recomputed: bool
) -> None:
    """Each layer kept the keys of the prompt once for each response: several times as much as all else of a pass."""
    rows, bytes_by_token, made = rows_of([(prompt, [1] * members)]), list[float](), list[dict[str, torch.Tensor]]()
    for share in (False, True):
        model = model_of("llama", tied=True)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        (batch,) = passes(rows, 10**6, share=share)
        held, loss = kept(model, batch)
        loss.backward()
        bytes_by_token.append(held / batch.tokens_L.numel())
        made.append(gradients(model))
    whole, shared = made
    assert [name for name in whole if (shared[name] - whole[name]).norm() > NEAR * (1 + whole[name].norm())] == []
    assert recomputed or bytes_by_token[1] < 1.5 * bytes_by_token[0]


@quick(10)
@given(prompt=st.integers(40, 80), response=st.integers(60, 120))
def test_long_responses_that_share_a_prompt_keep_no_more_for_a_token_than_whole_rows(
    prompt: int, response: int
) -> None:
    """Attention kept a mask of numbers for each response in each layer."""
    model, rows, bytes_by_token = model_of("llama", tied=True), rows_of([(prompt, [response] * 6)]), list[float]()
    for share in (False, True):
        (batch,) = passes(rows, 10**6, share=share)
        bytes_by_token.append(kept(model, batch)[0] / batch.tokens_L.numel())
    whole, shared = bytes_by_token
    assert shared < 1.2 * whole


@given(piece=st.integers(1, 40), seen=st.integers(1, 40))
def test_rows_of_a_mask_begin_where_kernels_of_a_gpu_can_read_them(piece: int, seen: int) -> None:
    (mask,) = attention._masks(torch.zeros(1), [seen, piece], [0, seen]).values()  # pyright: ignore[reportPrivateUsage]
    assert mask.stride(0) % attention.ALIGNED == 0 == attention.ALIGNED % 8
    assert torch.equal(mask[:, : seen + piece] == 0, torch.ones(piece, seen + piece).tril(seen) == 1)


def test_short_prompts_and_lone_rows_are_left_whole() -> None:
    for shape in [(1, [3, 4]), (2, [20, 20]), (30, [5])]:
        assert not any(Sizes.of(rows_of([shape])).shared), shape
    assert Sizes.of(rows_of([(30, [5, 5])]), share=False).shared == [0, 0]


@quick(100)
@given(shape=shapes, most=st.integers(1, 60), seed=st.integers(0, 99))
def test_no_token_is_lost_and_each_piece_sees_what_its_row_has_before_it(
    shape: list[Shape], most: int, seed: int
) -> None:
    rows = rows_of(shape, seed)
    sizes, begin = Sizes.of(rows), 0
    for end in cuts(sizes, most):
        part, its = sizes.part(begin, end), rows[begin:end]
        layout = Layout.of(part)
        pieces = layout.pieces(torch.from_numpy)
        tokens = np.concatenate([np.concatenate((row.prompt, row.tokens)) for row in its])[layout.kept]
        assert len(tokens) == sum(pieces.lengths) == part.total <= max(most, part.tokens[0])
        assert pieces.longest == max(pieces.lengths)
        assert pieces.starts_N.tolist() == [0, *np.cumsum(pieces.lengths)]
        assert seen_by_rows(tokens, pieces) == [(*row.prompt.tolist(), *row.tokens.tolist()) for row in its]
        begin = end
    assert begin == len(rows)


def seen_by_rows(tokens: Any, pieces: Pieces) -> list[tuple[int, ...]]:
    """What the last token of each row attends to, by the arguments of one call over all pieces."""
    keys = tokens if pieces.context is None else tokens[pieces.context.where_K]
    _, starts_K, _, longest = pieces.reach
    seen = [tuple(keys[begin:end].tolist()) for begin, end in pairwise(starts_K.tolist())]
    assert longest == max(map(len, seen))
    if pieces.context is None:
        return seen
    before = [*pieces.context.before, 0]
    return [each for at, each in enumerate(seen) if before[at] or not before[at + 1]]  # not the common pieces


@quick(100)
@given(shape=shapes, ranks=st.integers(1, 5), pairs=st.floats(10, 1000), seed=st.integers(0, 99))
def test_ranks_have_about_as_much_to_do_and_a_prompt_is_divided_only_if_that_is_better(
    shape: list[Shape], ranks: int, pairs: float, seed: int
) -> None:
    rows = rows_of(shape, seed)
    found = {share: shared_out(rows, ranks, pairs, share) for share in (False, True)}
    for each in found.values():
        assert sorted(at for mine in each for at in mine) == list(range(len(rows)))
        assert all(mine == sorted(mine) for mine in each)

    def costs(given: list[list[int]], share: bool) -> list[float]:
        return [Sizes.of([rows[at] for at in mine], share).cost(pairs) for mine in given]

    apart = costs(found[False], share=False)
    assert max(apart) - min(apart) <= max(Sizes.of([row]).cost(pairs) for row in rows) + 1e-6
    assert max(costs(found[True], share=True)) <= max(costs(found[False], share=True)) + 1e-6


def test_what_a_row_costs_grows_with_what_it_attends_to() -> None:
    assert Sizes([10], [0]).cost(5.0) == 10 + 50 / 5
    assert Sizes([10, 10], [0, 4]).cost(5.0) == 16 + (50 + 50 - 8) / 5
    assert Sizes([10, 10], [0, 4]).families == [range(2)]
    assert Sizes([10, 10, 3], [0, 0, 2]).families == [range(1), range(1, 3)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"advantage": "gae", "entropy_coefficient": 0.01},
        {"kl_coefficient": 0.1, "micro_tokens": 16},
        {"updates_per_step": 2, "correction": "decoupled"},
        {"lora_rank": 2},
    ],
    ids=["plain", "values", "reference", "two-updates", "lora"],
)
def test_a_trainer_makes_the_same_updates(more: dict[str, Any]) -> None:
    base, shape = model_of("llama", tied=False), [(9, [2, 5, 3]), (1, [4, 4]), (12, [6, 1, 1, 3])]
    shared, whole = (
        Trainer(copy.deepcopy(base), TrainerOptions(0, learning_rate=1e-2, share_prompts=share, **more))
        for share in (True, False)
    )
    for step in range(3):
        for trainer in (shared, whole):
            trainer.feed(step, groups_of(shape, seed=step, version=step))
            assert trainer.finish(step).updates == trainer.options.updates_per_step
    for one, other in zip(shared.parameters, whole.parameters, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_pass_is_filled_by_the_tokens_that_it_computes() -> None:
    rows = rows_of([(20, [2] * 8)])
    assert len(passes(rows, 60, share=True)) == 1
    assert len(passes(rows, 60, share=False)) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_in_bfloat16_on_a_gpu_are_as_near_to_float64_as_those_of_whole_rows(family: str) -> None:
    from staleflow.training import kernels
    from tests.training.test_decoder import micro_batch_on_gpu

    assert flash_shares(torch.device("cuda"))
    exact, rows = model_of(family, tied=True, hidden=64), rows_of([(40, [90, 3, 50]), (1, [7]), (300, [9, 70, 20, 4])])
    (batch,) = passes(rows, 10**9, share=False)
    objective(forward(exact, batch, 0.8, train_entropy=True)).backward()
    wanted, apart = gradients(exact), dict[bool, dict[str, float]]()
    for share in (False, True):
        model = copy.deepcopy(exact).float().cuda()
        model.zero_grad()
        decoder = Decoder(model, kernels) if family == "llama" else None
        (batch,) = passes(rows, 10**9, share=share)
        out = forward(model, micro_batch_on_gpu(batch), 0.8, train_entropy=True, half=True, decoder=decoder)
        objective(out).backward()
        apart[share] = {name: float((each.cpu() - wanted[name]).norm()) for name, each in gradients(model).items()}
    whole, shared = apart[False], apart[True]
    assert shared.keys() == wanted.keys()
    assert [name for name in wanted if shared[name] > 1.5 * whole[name] + 2e-2 * wanted[name].norm()] == []


class OnAGpu(Trainer):
    _half = True  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def _place(self) -> None:
        pass


def test_a_gpu_on_which_sharing_is_wrong_is_told_and_goes_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went without a word, and nobody could know why steps were slow."""
    monkeypatch.setattr(trainer_module, "flash_shares", lambda _: False)
    trainer = OnAGpu(model_of("llama", tied=True), TrainerOptions(0))
    with pytest.warns(UserWarning, match="prompts are not shared"):
        assert not trainer._sharing  # pyright: ignore[reportPrivateUsage]
