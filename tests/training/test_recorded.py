"""Recorded passes: what is filled up, with prompts shared or not, is what is not."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.training import decoder
from staleflow.training import recorded as recorded_module
from staleflow.training.decoder import Decoder
from staleflow.training.micro_batches import MicroBatch, forward, micro_batches
from staleflow.training.pieces import Pieces, Sizes
from staleflow.training.recorded import Recordings, Room, blank, fill, padding, starts
from staleflow.training.rehearsal import rehearse
from staleflow.training.trainer import GroupRows, Trainer, TrainerOptions
from tests.training.batches import quick
from tests.training.test_decoder import NEAR, by_hand, gradients, micro_batch_on_gpu, model_of, objective
from tests.training.test_pieces import Shape, groups_of, rows_of

shapes = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=4
)
sizes_of_recordings = st.sampled_from([(64, 96, 128, 192, 256, 384, 768), (512, 768)])


@quick(100)
@given(
    lengths=st.lists(st.integers(2, 40), max_size=40),
    tokens=st.sampled_from([64, 96, 256, 768]),
    rows=st.integers(1, 60),
    longest=st.sampled_from([40, 64, 200]),
)
def test_a_recording_is_filled_up_with_rows_that_it_has_room_for(
    lengths: list[int], tokens: int, rows: int, longest: int
) -> None:
    found, rest, spare = starts(lengths, tokens, rows, longest), tokens - sum(lengths), rows - len(lengths)
    if found is None:
        assert rest < 0 or spare < 0 or -(-rest // longest) > spare
        return
    sizes = np.diff(found)
    assert len(sizes) == rows
    assert sizes[: len(lengths)].tolist() == lengths
    assert sizes.sum() == tokens
    assert 0 <= sizes.min() <= sizes.max() <= longest


def test_padding_is_cut_into_short_rows_where_there_is_room_for_them() -> None:
    """Each token of a row of padding attended to all before it: rows as long as the longest cost most."""
    assert padding(1000, 20, 1024) == [128] * 7 + [104]
    assert padding(1000, 2, 1024) == [500, 500]
    assert padding(0, 0, 1024) == []


def pieces_of(shape: list[Shape], share: bool = True) -> Pieces:
    return next(micro_batches(rows_of(shape), 10**9, share=share)).pieces


@quick(100)
@given(shape=shapes, share=st.booleans(), sizes=sizes_of_recordings)
def test_a_room_is_the_smallest_that_its_pass_fits_in(shape: list[Shape], share: bool, sizes: tuple[int, ...]) -> None:
    pieces = pieces_of(shape, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_module, "SIZES", sizes)
        patch.setattr(recorded_module, "SHORTEST", 16)
        room = Room.of(pieces)
    if room is None:
        assert sum(pieces.lengths) > sizes[-1] or len(pieces.lengths) > sum(pieces.lengths) // 4 - 1
        return
    assert room.holds(pieces)
    assert room.tokens == next(size for size in sizes if size >= sum(pieces.lengths))
    levels = [room.tokens // each for each in recorded_module.TOKENS_OF_A_ROW]
    assert next(level for level in levels if room._replace(rows=level).holds(pieces)) == room.rows
    assert not room._replace(longest=pieces.longest - 1).holds(pieces)
    if pieces.context is None:
        assert room.keys == room.reach == 0
        assert not room._replace(keys=10**6, reach=room.longest).holds(pieces)
        return
    seen = pieces.context.where_K.numel() + room.tokens - sum(pieces.lengths)
    assert room._replace(keys=seen).holds(pieces)
    assert not room._replace(keys=seen - 1).holds(pieces)
    assert not room._replace(reach=pieces.context.longest - 1).holds(pieces)
    assert seen <= room.keys < max(2 * seen, 2 * room.tokens + 1)
    assert room.longest <= room.reach <= room.tokens


def test_attention_is_launched_for_about_as_many_rows_as_there_are() -> None:
    """It was launched for a row for each four tokens, and took longer than that of a pass of eight times as many."""
    few, many = Room(3072, 48, 512), Room(4096, 341, 256, keys=3 * 4096, reach=256)
    assert Room.of(pieces_of([(128, [242] * 8)], share=False)) == few
    assert Room.of(pieces_of([(40, [21] * 8)] * 16)) == many
    assert len(blank(few, torch.device("cpu")).pieces.starts_N) == few.rows + 1


@pytest.mark.parametrize("lacks", ["rows", "keys", "reach", "longest", "tokens"])
def test_a_batch_is_not_put_where_there_is_no_room_for_it(lacks: str) -> None:
    """What is behind the end of a recording would belong to nobody, or to others."""
    batch = next(micro_batches(rows_of([(30, [5] * 8)] * 3), 10**9, share=True))
    room = Room(tokens=512, rows=42, longest=256, keys=3 * 512, reach=256)
    assert Room.of(batch.pieces) == room
    short = {"rows": 27, "keys": 1000, "reach": 34, "longest": 28, "tokens": 200}[lacks]
    small = Room(**room._asdict() | {lacks: short})
    assert not small.holds(batch.pieces)


@quick(25)
@given(
    shapes=st.lists(shapes, min_size=1, max_size=4),
    share=st.booleans(),
    sizes=sizes_of_recordings,
    block=st.sampled_from([4, 128]),
    making=st.sampled_from([0, 10**9]),
    most_made=st.sampled_from([1, 2, 40]),
)
def test_a_pass_has_the_outputs_and_gradients_of_one_that_is_not_recorded_whatever_recording_it_takes(
    shapes: list[list[Shape]], share: bool, sizes: tuple[int, ...], block: int, making: int, most_made: int
) -> None:
    """And whatever was in its place before."""
    batches = [next(micro_batches(rows_of(shape, at), 10**9, share=share)) for at, shape in enumerate(shapes)]
    plain = model_of("llama", tied=False)
    model = copy.deepcopy(plain)
    free, recorded = by_hand(plain), by_hand(model)
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, SIZES=sizes, SHORTEST=16, BLOCK=block, MAKING=making, MOST_MADE=most_made)
        recorded.recordings = Recordings(recorded)
        for batch in [*batches, *batches]:
            for each, way in ((plain, free), (model, recorded)):
                objective(forward(each, batch, 1.0, decoder=way)).backward()
            found, expected = gradients(model), gradients(plain)
            assert all(torch.allclose(found[name], expected[name], atol=NEAR) for name in expected)


def recordings_here(patch: pytest.MonkeyPatch, **limits: Any) -> tuple[Recordings, list[Room]]:
    """And the rooms of those that are made."""
    made: list[Room] = []

    def record(_: Decoder, room: Room, __: object) -> Room:
        made.append(room)
        return room

    emulate(patch, Recording=record, **limits)
    return Recordings(by_hand(model_of("llama", tied=False))), made


def found_for(recordings: Recordings, shape: list[Shape], share: bool = True) -> Any:
    return recordings.find(next(micro_batches(rows_of(shape), 10**9, share=share)))


def test_a_recording_is_made_again_only_once_passes_have_lost_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size that a run met stopped it for a recording, though another one was there."""
    recordings, made = recordings_here(monkeypatch, MAKING=5000)
    large = found_for(recordings, [(100, [99] * 10)], share=False)
    small = Room.of(pieces_of([(100, [99] * 5)], share=False))
    assert small is not None
    for _ in range(4999 // (large.cost - small.cost)):
        assert found_for(recordings, [(100, [99] * 5)], share=False) == large
    assert found_for(recordings, [(100, [99] * 5)], share=False) == small
    assert found_for(recordings, [(100, [99] * 5)], share=False) == small
    assert found_for(recordings, [(100, [99] * 10)], share=False) == large
    assert made == [large, small]


def test_no_recording_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest number of tokens may come with room for more rows, and cost more, than the next one."""
    recordings, made = recordings_here(monkeypatch, MAKING=100)
    largest, small, next_one = ([(10, [510]), (2, each)] for each in ([7] * 390, [3] * 96, [7] * 100))
    found = [found_for(recordings, shape, share=False) for shape in (largest, small, next_one, small)]
    assert made == found[:3]
    assert found[3] == found[2]
    assert found[2].cost < found[1].cost


@quick(20)
@given(seed=st.integers(0, 999), share=st.booleans())
def test_a_run_never_makes_more_recordings_than_there_may_be(seed: int, share: bool) -> None:
    """Each new length of responses stopped it for another one, until the end."""
    random = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        recordings, made = recordings_here(patch, MOST_MADE=4, MAKING=100)
        for _ in range(30):
            prompt, longest, groups = random.integers(1, 200), random.integers(1, 300), random.integers(1, 6)
            shape = [(int(prompt), random.integers(1, longest + 1, 8).tolist()) for _ in range(groups)]
            pieces, found = pieces_of(shape, share), found_for(recordings, shape, share)
            fits = [room for room in made if room.holds(pieces)]
            assert (found is None) == (not fits)
            assert found is None or found in fits
        assert 1 <= len(made) <= 4


@pytest.mark.parametrize(("groups", "passes"), [(4, 1), (5, 2), (8, 2), (9, 1)])
def test_what_two_recordings_hold_is_cut_for_them_and_what_is_more_is_not(groups: int, passes: int) -> None:
    """One pass of five thousand tokens waited for its launches longer than two recorded ones take."""
    trainer = Trainer(model_of("llama", tied=False), TrainerOptions(0, micro_tokens=1000))
    trainer._decoder = by_hand(trainer.model)
    trainer._decoder.recordings = cast(Any, SimpleNamespace(most=64, find=lambda _: None))
    done: list[None] = []
    trainer.on_pass = lambda: done.append(None)
    trainer.feed(0, groups_of([(5, [3] * 3)] * groups))  # 4 + 3 * 4 tokens
    trainer.flush()
    assert len(done) == passes


def rehearsed(patch: pytest.MonkeyPatch, share: bool) -> tuple[Recordings, list[Room]]:
    """What a rehearsal records, by the order in which it does."""
    recordings, made = recordings_here(patch)
    trainer = Trainer(model_of("llama", tied=False), TrainerOptions(0, share_prompts=share, micro_tokens=16_384))

    def compute(groups: list[GroupRows]) -> None:
        rows = [row for group in groups for row in group]
        if Sizes.of(rows, share).total <= recordings.most:
            recordings.find(next(micro_batches(rows, 10**9, share=share)))

    patch.setattr(trainer, "compute", compute)
    rehearse(trainer)
    return recordings, made


@pytest.mark.parametrize("share", [False, True])
def test_each_size_is_rehearsed_and_with_shared_prompts_where_they_are_shared(
    share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = rehearsed(monkeypatch, share)
    sizes = recorded_module.SIZES
    assert [room for room in made if not room.keys] == [Room(each, each // 12, 512) for each in sizes]
    shared = [Room(each, each // 12, 512, 4 * each, 512) for each in sizes if share]
    assert [room for room in made if room.keys] == shared


@pytest.mark.parametrize(
    ("prompt", "response", "members"), [(48, 13, 8), (100, 100, 8), (128, 242, 8), (300, 180, 8), (60, 30, 16)]
)
@pytest.mark.parametrize("share", [False, True])
def test_the_first_passes_of_a_run_fit_what_was_rehearsed(
    prompt: int, response: int, members: int, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step waited for recordings."""
    recordings, made = rehearsed(monkeypatch, share)
    before = len(made)
    for groups in range(1, 40):
        pieces = pieces_of(shape := [(prompt, [response, response * 3 // 4] * (members // 2))] * groups, share)
        if sum(pieces.lengths) <= recordings.most:
            assert found_for(recordings, shape, share) is not None
    assert len(made) == before


def test_passes_that_cannot_be_recorded_where_prompts_are_shared_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    emulate(monkeypatch, Recording=fails)
    recordings = Recordings(by_hand(model_of("llama", tied=False)))
    shared, whole = (next(micro_batches(rows_of([(9, [2] * 4)]), 10**9, share=share)) for share in (True, False))
    with pytest.warns(UserWarning, match="cannot be recorded here: RuntimeError: operation not permitted"):
        assert recordings.find(shared) is None
    assert recordings.find(shared) is None
    with pytest.raises(RuntimeError, match="not permitted"):
        recordings.find(whole)


def emulate(patch: pytest.MonkeyPatch, **names: Any) -> None:
    """Recordings without a GPU, and with these limits."""
    patch.setattr(torch.cuda, "graph_pool_handle", object)
    for name, value in ({"Recording": Unrecorded} | names).items():
        patch.setattr(recorded_module, name, value)


class Unrecorded:
    """What a recording does, without a graph."""

    def __init__(self, made: Decoder, room: Room, _: object) -> None:
        self._decoder, self._places = made, blank(room, torch.device("cpu"))

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        fill(self._places, batch)
        self._hidden, self._kept = self._decoder.forward(self._places, keep=True)
        return self._hidden[: batch.predicting_T.numel()].clone()

    def backward(self, d_hidden: torch.Tensor) -> None:
        padded = torch.zeros_like(self._hidden)
        padded[: len(d_hidden)] = d_hidden
        self._decoder.backward(self._places, self._kept, padded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_recorded_pass_has_the_gradients_of_one_that_is_not(family: str, share: bool) -> None:
    from staleflow.training import kernels

    model = model_of(family, tied=True, hidden=64).float().cuda()
    shapes = [[(3, [40]), (7, [90])], [(20, [300, 2])], [(5, [200]), (3, [309])], [(48, [9, 3, 20])] * 7, [(1, [700])]]
    shapes += [[(90, [300, 40, 5, 1]), (2, [30])], [(60, [1] * 8)], [(3, [7])], [(400, [100] * 3)]]
    batches = [
        micro_batch_on_gpu(next(micro_batches(rows_of(shape, seed), 10**9, share=share)))
        for seed, shape in enumerate(shapes)
    ]
    found: list[Any] = []
    for recorded in (decoder.by_hand(model), Decoder(model, kernels)):
        model.zero_grad(set_to_none=True)
        outs: list[torch.Tensor] = []
        for batch in batches:
            out = forward(model, batch, 1.0, decoder=recorded)
            objective(out).backward()
            outs.append(out.logprobs_T.detach())
        found.append((torch.cat(outs), {name: each.clone() for name, each in gradients(model).items()}))
    (logprobs, made), (expected, wanted) = found
    assert torch.equal(logprobs, expected)
    assert [name for name in wanted if (made[name] - wanted[name]).norm() > 1e-3 * wanted[name].norm()] == []
