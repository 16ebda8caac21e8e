"""Recorded passes: what is filled up, with prompts shared or not, is what is not."""

import copy
from types import SimpleNamespace
from typing import Any, Self, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.training import decoder
from staleflow.training import recorded as recorded_module
from staleflow.training.decoder import Decoder
from staleflow.training.micro_batches import MicroBatch, forward, micro_batches
from staleflow.training.recorded import Recordings, Room, blank, fill, starts
from staleflow.training.rehearsal import rehearse
from staleflow.training.trainer import GroupRows, Trainer, TrainerOptions
from tests.training.batches import quick
from tests.training.test_decoder import NEAR, by_hand, gradients, micro_batch_on_gpu, model_of, objective
from tests.training.test_pieces import Shape, groups_of, rows_of

shapes = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=4
)


@quick(60)
@given(
    lengths=st.lists(st.integers(2, 40), max_size=40),
    tokens=st.sampled_from([64, 256, 512]),
    longest=st.sampled_from([64, 128]),
)
def test_a_recording_is_filled_up_with_rows_that_are_not_longer_than_it_is_made_for(
    lengths: list[int], tokens: int, longest: int
) -> None:
    if sum(lengths) > tokens:
        return
    found = starts(lengths, tokens, longest)
    if found is None:
        assert len(lengths) + -(-(tokens - sum(lengths)) // longest) > tokens // 4
        return
    sizes = np.diff(found)
    assert sizes[: len(lengths)].tolist() == lengths
    assert sizes.sum() == tokens
    assert 0 <= sizes.min() <= sizes.max() <= longest
    assert starts([], tokens, longest).shape == found.shape  # pyright: ignore[reportOptionalMemberAccess]


@quick(25)
@given(shapes=st.lists(shapes, min_size=1, max_size=3), share=st.booleans(), fewest=st.sampled_from([64, 512]))
def test_a_pass_that_is_filled_up_has_the_outputs_and_gradients_of_one_that_is_not(
    shapes: list[list[Shape]], share: bool, fewest: int
) -> None:
    """Whatever was in its place before."""
    batches = [next(micro_batches(rows_of(shape, at), 10**9, share=share)) for at, shape in enumerate(shapes)]
    batches = [each for each in batches if (each.pieces.context is None) == (batches[0].pieces.context is None)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("staleflow.training.recorded.FEWEST", fewest)
        room = Room(*map(max, zip(*(Room.of(each.pieces) for each in batches), strict=True)))
    if any(starts(each.pieces.lengths, room.tokens, room.longest) is None for each in batches):
        return
    plain = model_of("llama", tied=False)
    model = copy.deepcopy(plain)
    free, recorded = by_hand(plain), by_hand(model)
    recorded.recordings = cast(Any, Unrecorded(recorded, room))
    for batch in batches:
        for each, way in ((plain, free), (model, recorded)):
            objective(forward(each, batch, 1.0, decoder=way)).backward()
        found, expected = gradients(model), gradients(plain)
        assert all(torch.allclose(found[name], expected[name], atol=NEAR) for name in expected)


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


@pytest.mark.parametrize("share", [False, True])
def test_recordings_are_rehearsed_with_shared_prompts_where_they_are_shared(
    share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Trainer(model_of("llama", tied=False), TrainerOptions(0, share_prompts=share))
    rooms = set[Room]()

    def compute(groups: list[GroupRows]) -> None:
        rows = [row for group in groups for row in group]
        rooms.add(Room.of(next(micro_batches(rows, 10**9, share=True)).pieces))

    monkeypatch.setattr(made, "compute", compute)
    rehearse(made)
    sizes = (512, 1024, 2048, 4096)
    assert {Room(tokens, 256) for tokens in sizes} < rooms
    assert {room for room in rooms if room.keys} == {Room(each, 256, 4 * each, 256) for each in sizes if share}


def test_passes_that_cannot_be_recorded_where_prompts_are_shared_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(recorded_module, "Recording", fails)
    recordings = Recordings(by_hand(model_of("llama", tied=False)))
    shared, whole = (next(micro_batches(rows_of([(9, [2] * 4)]), 10**9, share=share)) for share in (True, False))
    with pytest.warns(UserWarning, match="cannot be recorded here: RuntimeError: operation not permitted"):
        assert recordings.find(shared) is None
    assert recordings.find(shared) is None
    with pytest.raises(RuntimeError, match="not permitted"):
        recordings.find(whole)


class Unrecorded:
    """What a recording does, without a graph."""

    def __init__(self, made: Decoder, room: Room) -> None:
        self._decoder, self._places = made, blank(room, torch.device("cpu"))

    def find(self, _: MicroBatch) -> Self:
        return self

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
